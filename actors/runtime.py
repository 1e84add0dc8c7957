"""Starting and ending Monarch properly, and meshes by role.

Five facts of Monarch 0.7 shape this module (each has a test):

1. Dead processes are noticed by polling, every 10 s unless the environment says otherwise before the first
   import of `monarch`; hence the variable set here and the late imports.
2. A failure that nobody owns interrupts the main thread of the client; the fault hook below records it
   instead, and the next call to the dead mesh raises.
3. With log forwarding on, stopping a mesh that lost a process never returns; it is off.
4. Every stop is bounded. What does not stop in time dies with the client (children ask the kernel for it).
5. `shutdown_context` is one-way: a process can run one `MonarchRuntime` after another, but nothing after
   `shutdown`.

Code that spawns is agnostic about the `hosts` dimension: meshes of the local launcher have none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_composer.config.schema import RuntimeConfig

os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "1s")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # one NUMA remark from each process otherwise


@dataclass(slots=True, frozen=True)
class Role:
    """How the processes of one role are spawned: `per_host` on each of `hosts`."""

    name: str
    per_host: int
    hosts: int = 1
    environment: dict[str, str] = field(default_factory=dict)


def _prepare_process(variables: dict[str, str]) -> Callable[[], None]:
    """What each new process runs before it loads any actor class."""

    def bootstrap() -> None:
        os.environ.update(variables)
        with contextlib.suppress(PermissionError):  # the leader of a session stays where it is
            os.setpgid(0, 0)  # the terminal's Ctrl-C is the client's: it stops its children in order

    return bootstrap


class MonarchRuntime:
    """Owns every mesh of a run: `async with MonarchRuntime(config) as runtime: runtime.spawn(role)`."""

    def __init__(self, config: RuntimeConfig, roles: tuple[Role, ...]) -> None:
        self.config = config
        self.roles = {role.name: role for role in roles}
        self.faults: list[str] = []
        """Reports of failures that reached the client, in order."""
        self._meshes: dict[str, Any] = {}
        self._hosts: dict[str, Any] = {}
        self._job: Any = None

    async def __aenter__(self) -> MonarchRuntime:
        _export_import_path()
        import monarch.actor
        from monarch.config import configure

        configure(enable_log_forwarding=False)
        # Never taken back: late reports about meshes that are gone must not interrupt the client either.
        monarch.actor.unhandled_fault_hook = self._note_fault
        try:
            self._hosts = await asyncio.to_thread(self._start_hosts)
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    def _note_fault(self, failure: Any) -> None:
        self.faults.append(str(failure.report()) if hasattr(failure, "report") else str(failure))

    def _start_hosts(self) -> dict[str, Any]:
        """A host mesh for each role."""
        if self.config.launcher == "local":
            from monarch.actor import this_host

            return {name: this_host() for name in self.roles}
        self._job = make_job(self.config, self.roles)
        state = self._job.state(cached_path=None)
        return {name: getattr(state, name) for name in self.roles}

    def spawn(self, name: str) -> Any:
        """The process mesh of a role. Returns at once; the first call to an actor waits for the processes."""
        role = self.roles[name]
        mesh = self._hosts[name].spawn_procs(
            per_host={"procs": role.per_host}, name=name, bootstrap=_prepare_process(role.environment)
        )
        self._meshes[name] = mesh
        return mesh

    async def stop(self) -> None:
        """Stop all meshes within `runtime.stop_timeout_s`; end the job."""
        meshes, self._meshes = self._meshes, {}
        await asyncio.gather(
            *(self._bounded(f"stopping the {name} mesh", mesh.stop()) for name, mesh in meshes.items())
        )
        if self._job is not None:
            job, self._job = self._job, None
            with contextlib.suppress(Exception):
                async with asyncio.timeout(self.config.stop_timeout_s):
                    await asyncio.to_thread(job.kill)

    async def shutdown(self) -> None:
        """End Monarch in this process, for good. Call it last."""
        from monarch.actor import shutdown_context

        await self._bounded("shutting Monarch down", shutdown_context(host_timeout=2.0))

    async def _bounded(self, what: str, future: Any) -> None:
        try:
            async with asyncio.timeout(self.config.stop_timeout_s):
                await _as_awaitable(future)
        except Exception as error:
            self.faults.append(f"{what}: {type(error).__name__}: {error}")


def _as_awaitable(future: Any) -> Awaitable[Any]:
    """A Monarch future as something that asyncio can put a deadline on."""
    awaitable: Awaitable[Any] = future.as_asyncio() if hasattr(future, "as_asyncio") else future
    return awaitable


def _export_import_path() -> None:
    """Children import actor classes by name: give them the folders that this process imports from."""
    root = str(Path(__file__).resolve().parent.parent)
    if root.endswith("forge_composer"):  # found through the package's symlink or in an installed wheel
        root = str(Path(root).parent)
    known = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    wanted = [root, *(entry for entry in sys.path if entry and Path(entry).is_dir())]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*known, *wanted]))


def make_job(config: RuntimeConfig, roles: dict[str, Role]) -> Any:
    """The Monarch job of a launcher other than `local`, with one host mesh a role.

    Environment workers and the buffer take one host each.
    """
    meshes = {name: role.hosts for name, role in roles.items()}
    if config.launcher == "process":
        from monarch.job import ProcessJob

        return ProcessJob(meshes)
    if config.launcher == "slurm":
        from monarch.job import SlurmJob

        slurm = config.slurm
        return SlurmJob(
            meshes,
            python_exe=sys.executable,
            slurm_args=slurm.extra_args,
            time_limit=slurm.time_limit,
            partition=slurm.partition,
            account=slurm.account,
            qos=slurm.qos,
            gpus_per_node=slurm.gpus_per_node,
            cpus_per_task=slurm.cpus_per_task,
            mem=slurm.mem,
        )
    from monarch.job.kubernetes import ImageSpec, KubernetesJob

    kubernetes = config.kubernetes
    job = KubernetesJob(kubernetes.namespace, timeout=int(config.start_timeout_s))
    for name, hosts in meshes.items():
        image = ImageSpec(kubernetes.image) if kubernetes.image else None
        job.add_mesh(name, hosts, image_spec=image, port=kubernetes.port)
    return job
