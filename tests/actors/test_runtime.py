"""Monarch started and ended properly: real meshes, real processes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from toys import Toy

from forge_composer.actors.calls import ActorCallError, call_all, call_one, each
from forge_composer.actors.runtime import MonarchRuntime, Role
from forge_composer.config.schema import RuntimeConfig


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize(("launcher", "hosts"), [("local", 1), ("process", 2)])
async def test_meshes_by_role_whatever_the_launcher(launcher: str, hosts: int) -> None:
    """Ranks count over all hosts, each process has its role's variables, nothing is left at the end."""
    before = children()
    config = RuntimeConfig(launcher=launcher)
    role = Role("trainer", per_host=2, hosts=hosts, environment={"OMP_NUM_THREADS": "3"})
    async with MonarchRuntime(config, (role,)) as runtime:
        actors = runtime.spawn("trainer").spawn("toy", Toy)
        about = await call_all(actors, "about", timeout=60)
        singly = [await call_one(actor, "about", timeout=60) for actor in each(actors)]
    assert [item["rank"] for item in about] == list(range(2 * hosts))
    assert [item["pid"] for item in singly] == [item["pid"] for item in about]
    assert len({item["pid"] for item in about} | {os.getpid()}) == 2 * hosts + 1
    assert all(item["threads"] == "3" for item in about)
    assert os.getpgid(0) not in {item["group"] for item in about}, "Ctrl-C would reach the children first"
    _, left = psutil.wait_procs(
        [p for p in psutil.Process().children(recursive=True) if p.pid not in before], timeout=10
    )
    assert not left


async def test_what_an_actor_raises_is_raised_here_and_it_lives_on() -> None:
    async with MonarchRuntime(RuntimeConfig(), (Role("generator", per_host=1),)) as runtime:
        actors = runtime.spawn("generator").spawn("toy", Toy)
        with pytest.raises(KeyError, match="what the actor raised"):
            await call_one(actors, "fail", timeout=60)
        assert (await call_one(actors, "about", timeout=60))["rank"] == 0


async def test_deadlines_and_deaths_become_errors_and_the_client_goes_on() -> None:
    async with MonarchRuntime(RuntimeConfig(), (Role("generator", per_host=1),)) as runtime:
        actors = runtime.spawn("generator").spawn("toy", Toy)
        await call_one(actors, "about", timeout=60)
        with pytest.raises(ActorCallError, match=r"sleep\(\) did not answer within 0.2 s"):
            await call_one(actors, "sleep", timeout=0.2)
        began = time.monotonic()
        with pytest.raises(ActorCallError, match=r"the process that ran die\(\) died"):
            await call_one(actors, "die", timeout=30)
        assert time.monotonic() - began < 8, "the poll interval was not set before monarch was imported"
    assert runtime.faults
