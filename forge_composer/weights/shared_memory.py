"""Weights through shared memory: one safetensors file a version, written once and mapped by every replica.

A version appears under its name only when it is whole (written aside, then renamed). The last two versions
are kept: a replica may still read one while the next is written. A file that is removed stays readable for
whoever has it mapped.

The folder is locked by its owner for as long as it lives. The lock goes with the process, however that ends,
and the next sender on the machine removes folders that nobody holds.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import shutil
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from forge_composer.weights.manifest import (
    TensorInfo,
    WeightManifest,
    WeightTransportError,
    check_tensors,
    checksum,
    own_copies,
)
from forge_composer.weights.message import newer, verify
from forge_composer.weights.transport import TensorReceiver, WeightSender

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "forge-composer-weights-"
KEPT = 2
"""Versions that are kept."""


class SharedMemorySender(WeightSender):
    """Publishes versions as files in shared memory, or in `fallback` where that is missing or too small."""

    def __init__(self, *, fallback: Path, root: Path = SHARED_MEMORY) -> None:
        self._root = root
        self._fallback = fallback
        self._folder: _OwnedFolder | None = None
        self._version: int | None = None
        self._files: list[Path] = []
        sweep(root)

    @property
    def folder(self) -> Path | None:
        """Where the versions are; None before the first."""
        return None if self._folder is None else self._folder.path

    def publish(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> WeightManifest:
        """See `WeightSender.publish`."""
        self._version = newer(version, self._version)
        tensors = own_copies(named_tensors)
        while len(self._files) >= KEPT:  # before writing, so that never more than KEPT take memory
            self._files.pop(0).unlink(missing_ok=True)
        path = (
            self._home(sum(t.numel() * t.element_size() for t in tensors.values()))
            / f"v{version}.safetensors"
        )
        unfinished = path.with_suffix(".unfinished")
        save_file(tensors, unfinished, metadata={"version": str(version)})
        with _mapped(unfinished) as data:
            manifest = WeightManifest(
                version=version,
                transport="shared_memory",
                tensors=tuple(TensorInfo.of(name, tensor) for name, tensor in tensors.items()),
                nbytes=len(data),
                checksum=checksum(data),
                location=str(path),
            )
        unfinished.rename(path)
        self._files.append(path)
        return manifest

    def close(self) -> None:
        """Remove every version and the folder."""
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
        self._files = []

    def _home(self, nbytes: int) -> Path:
        """The folder, made at the first publication: only then is the size known."""
        if self._folder is None:
            room = KEPT * nbytes + 2**20
            problem = _unfit(self._root, room)
            if problem:
                warnings.warn(
                    f"weights go through files in {self._fallback}, which is slower: {problem}", stacklevel=3
                )
                self._fallback.mkdir(parents=True, exist_ok=True)
            self._folder = _OwnedFolder(self._fallback if problem else self._root)
        return self._folder.path


class SharedMemoryReceiver(TensorReceiver):
    """Maps a version's file; tensors are views of the mapping."""

    @contextmanager
    def open(self, manifest: WeightManifest) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """See `TensorReceiver.open`."""
        if manifest.location is None:
            raise WeightTransportError(
                f"weights of version {manifest.version}: the manifest ({manifest.transport}) names no file; "
                "trainer and generators must use the same weights.transport"
            )
        path = Path(manifest.location)
        try:
            with _mapped(path) as data:
                verify(manifest, data)
            file: Any = safe_open(path, framework="pt")
        except (FileNotFoundError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise WeightTransportError(
                f"weights of version {manifest.version} are not at {path} ({error}): only the last {KEPT} "
                "versions are kept, on the trainer's host, until it ends"
            ) from error
        with file:
            found = (file.metadata() or {}).get("version")
            if found != str(manifest.version):
                raise WeightTransportError(f"{path} holds version {found}, not {manifest.version}")
            tensors = [(info.name, file.get_tensor(info.name)) for info in manifest.tensors]
            check_tensors(manifest, (TensorInfo.of(name, tensor) for name, tensor in tensors))
            yield iter(tensors)


class _OwnedFolder:
    """A folder that is locked by this process, and removed with this object or at exit."""

    def __init__(self, root: Path) -> None:
        name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        unlocked = root / f".{name}"  # sweep() must not meet it before it is locked
        unlocked.mkdir(mode=0o700)
        lock = os.open(unlocked / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.path = root / name
        unlocked.rename(self.path)
        self.remove = weakref.finalize(self, _remove, self.path, lock, os.getpid())


def _remove(folder: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the owner
        return
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def sweep(root: Path) -> list[Path]:
    """Remove weight folders under `root` whose owner is dead; returns them."""
    removed = []
    for folder in sorted(root.glob(f"{PREFIX}*")):
        try:
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # another user's, or just being removed
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
        finally:
            os.close(lock)
    return removed


def _unfit(root: Path, room: int) -> str:
    """Why `room` bytes cannot go to `root`; empty if they can."""
    if not root.is_dir() or not os.access(root, os.W_OK):
        return f"{root} is missing or not writable"
    free = shutil.disk_usage(root).free
    if free < room:
        return f"{root} has {free / 2**20:.0f} MiB free, {room / 2**20:.0f} MiB are needed"
    return ""


@contextmanager
def _mapped(path: Path) -> Iterator[memoryview]:
    """The bytes of a file, mapped read-only."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        view = memoryview(mapping)
        try:
            yield view
        finally:
            view.release()
