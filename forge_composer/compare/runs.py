"""Running arms x seeds as child processes: paired order, resumable, one after the other or several at once.

::

    FOLDER/runs/ARM/seed-S/            the run folder, as `apps.grpo_composer` makes it
    FOLDER/runs/ARM/seed-S.log         what the run printed
    FOLDER/runs/ARM/seed-S.unfinished-K/   an earlier attempt that did not end; never deleted
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from forge_composer.compare.curves import COMPLETED, run_status
from forge_composer.compare.experiment import Experiment
from forge_composer.config import Config, ConfigError, Problem
from forge_composer.metrics.summary import duration

_NOT_COMPARED = frozenset({"name", "seed", "output_dir", "metrics"})
"""Fields of a run config that have no part in what is learnt, or differ between runs by intention."""


class FolderInUseError(RuntimeError):
    """Another comparison, or a run that one left behind, is working in the folder."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One run of the experiment."""

    arm: str
    seed: int
    folder: Path

    @property
    def log(self) -> Path:
        """File that holds what the run printed."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def completed(self) -> bool:
        """True if the run was trained to its end."""
        return run_status(self.folder)[0] == COMPLETED

    def __str__(self) -> str:
        return f"{self.arm}, seed {self.seed}"


def plan(experiment: Experiment, folder: Path) -> list[Planned]:
    """All runs, seeds outside: when only a part of them is done, it is a part that has pairs."""
    return [
        Planned(arm.name, seed, folder / "runs" / arm.name / f"seed-{seed}")
        for seed in experiment.seeds
        for arm in experiment.arms
    ]


def check_completed(runs: Sequence[Planned], configs: Mapping[str, Config]) -> None:
    """Refuse finished runs of another config: they must not be mixed with those of this one.

    Raises:
        ConfigError: naming the fields that differ.
    """
    problems = []
    for run in runs:
        if not run.completed:
            continue
        if differing := _differences(run, configs[run.arm]):
            wrong = f"the finished run there was made with another config: {'; '.join(differing)}"
            remedy = "use another --output_dir, or move that run away"
            problems.append(Problem(str(run.folder), "", "", wrong, remedy))
    if problems:
        raise ConfigError(problems)


def _differences(run: Planned, config: Config) -> list[str]:
    try:
        text = (run.folder / "config.toml").read_text(encoding="utf-8")
        used = Config.model_validate(tomllib.loads(text))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ValidationError) as error:
        return [f"its config.toml cannot be read ({type(error).__name__})"]
    theirs, ours = used.model_dump(mode="json"), config.model_dump(mode="json")
    found = [] if used.seed == run.seed else [f"seed = {used.seed}"]
    return found + list(_unequal(theirs, ours))


def _unequal(theirs: Mapping[str, object], ours: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    for key in ours:
        before, now = theirs[key], ours[key]
        if before == now or prefix + key in _NOT_COMPARED:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            yield from _unequal(before, now, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key} = {before!r} there, {now!r} here"


class Runner:
    """Starts what is not finished yet, and stops it in an orderly way when it is told to."""

    def __init__(self, experiment: Experiment, command: Sequence[str], report: Callable[[str], None]) -> None:
        """`command` runs one config, given its arguments; `report` takes a line of progress."""
        self.experiment = experiment
        self.interrupted = False
        self._command = tuple(command)
        self._report = report
        self._children: set[asyncio.subprocess.Process] = set()
        self._began = self._ended = 0

    async def run(self, runs: Sequence[Planned], *, parallel: int, lock: int) -> None:
        """Run what is not completed, `parallel` at a time, in order.

        Runs that fail are reported and do not stop the others. `lock` is the descriptor of the folder's
        lock, which the children hold as well.
        """
        waiting = [run for run in runs if not run.completed]
        if finished := len(runs) - len(waiting):
            self._report(f"{finished} of {len(runs)} runs are finished already")
        queue = iter(waiting)

        async def work() -> None:
            for run in queue:
                if self.interrupted:
                    return
                await self._one(run, len(waiting), lock)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(parallel, len(waiting))):
                tasks.create_task(work())

    def interrupt(self) -> None:
        """Start nothing further; ask the children to end, and at the second call end them at once."""
        number = signal.SIGKILL if self.interrupted else signal.SIGINT
        self._report(
            "ending the runs at once"
            if self.interrupted
            else "interrupted: waiting for the runs to stop; a second Ctrl-C ends them at once"
        )
        self.interrupted = True
        for child in self._children:
            self._signal(child, number)

    async def _one(self, run: Planned, total: int, lock: int) -> None:
        self._began += 1
        self._report(f"{self._began} of {total}: {run}: running, log in {run.log}")
        began = time.monotonic()
        _move_aside(run.folder, self._report)
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        arguments = self.experiment.arguments(self.experiment.arm(run.arm), run.seed, run.folder)
        with run.log.open("wb") as log:
            # A session of its own: Ctrl-C on the terminal reaches only this process, which passes it on once.
            child = await asyncio.create_subprocess_exec(
                *self._command,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(lock,),
            )
        self._children.add(child)
        if self.interrupted:  # while the child was being started
            self._signal(child, signal.SIGINT)
        try:
            code = await child.wait()
        finally:
            self._children.discard(child)
        self._report(f"{run}: {_outcome(run, code)} after {duration(time.monotonic() - began)}")

    @staticmethod
    def _signal(child: asyncio.subprocess.Process, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if number is signal.SIGKILL:
                os.killpg(child.pid, number)
            else:
                child.send_signal(number)


def _outcome(run: Planned, code: int) -> str:
    status, reason = run_status(run.folder)
    if status == COMPLETED:
        return COMPLETED
    ending = f"signal {-code}" if code < 0 else f"exit status {code}"
    return f"{status or 'failed'} ({reason or ending}); see {run.log}"


def _move_aside(folder: Path, report: Callable[[str], None]) -> None:
    """Rename an unfinished run, and its log with it."""
    if not folder.exists():
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.unfinished-{number}")).exists():
        number += 1
    folder.rename(aside)
    log = folder.with_name(f"{folder.name}.log")
    if log.exists():
        log.rename(aside.with_name(f"{aside.name}.log"))
    report(f"{folder} holds an unfinished run: moved to {aside.name}")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Hold the folder for one comparison; the lock lasts until the last child that was given it has ended.

    Raises:
        FolderInUseError: it is held already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise FolderInUseError(
            f"{folder} is in use by another comparison, or by a run that one left behind"
        ) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)  # frees the lock unless a child still holds it
