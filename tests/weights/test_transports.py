"""All transports that run on this machine keep the same promises."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_composer.weights.manifest import TensorInfo, WeightManifest, WeightTransportError
from forge_composer.weights.message import MessageReceiver, MessageSender
from forge_composer.weights.shared_memory import KEPT, SharedMemoryReceiver, SharedMemorySender, sweep
from forge_composer.weights.transport import (
    TensorReceiver,
    WeightSender,
    make_receiver,
    make_sender,
)

Pair = tuple[WeightSender, TensorReceiver]


@pytest.fixture(params=["shared_memory", "message"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    sender = make_sender(request.param, fallback_dir=tmp_path, device="cpu")
    receiver = make_receiver(request.param, device="cpu")
    assert isinstance(receiver, TensorReceiver)
    yield sender, receiver
    sender.close()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[tuple[SharedMemorySender, SharedMemoryReceiver, Path]]:
    """The file transport with a folder of its own instead of /dev/shm."""
    root = tmp_path / "shm"
    root.mkdir()
    sender = SharedMemorySender(fallback=tmp_path / "weights", root=root)
    yield sender, SharedMemoryReceiver(), root
    sender.close()


def weights(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(33, 8, generator=generator).to(dtype),
        "layer.0.weight": torch.randn(8, 24, generator=generator).t().to(dtype),  # not contiguous
        "layer.0.bias": torch.randn(24, generator=generator).to(dtype),
        "scale": torch.tensor(float(seed), dtype=dtype),
    }


def receive(receiver: TensorReceiver, manifest: WeightManifest) -> dict[str, torch.Tensor]:
    with receiver.open(pickle.loads(pickle.dumps(manifest))) as tensors:
        return {name: tensor.clone() for name, tensor in tensors}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_round_trip_is_bitwise(pair: Pair, dtype: torch.dtype) -> None:
    sender, receiver = pair
    sent = weights(1, dtype)
    sent["edge"] = torch.tensor([float("nan"), float("inf"), -0.0]).to(dtype)
    manifest = sender.publish(5, iter(sent.items()))
    assert manifest.version == 5
    assert {t.name: t.shape for t in manifest.tensors} == {n: tuple(t.shape) for n, t in sent.items()}
    found = receive(receiver, manifest)
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    assert_same(
        {n: t.contiguous().view(integer) for n, t in found.items()},
        {n: t.contiguous().view(integer) for n, t in sent.items()},
    )


def test_tensors_may_change_after_publish(pair: Pair) -> None:
    sender, receiver = pair
    live = weights(2)
    manifest = sender.publish(1, live.items())
    for tensor in live.values():
        tensor.add_(1)
    assert_same(receive(receiver, manifest), weights(2))


def test_tied_tensors_travel_under_both_names(pair: Pair) -> None:
    sender, receiver = pair
    shared = torch.arange(6.0).reshape(2, 3)
    found = receive(receiver, sender.publish(0, [("embed", shared), ("head", shared)]))
    assert_same(found, {"embed": shared, "head": shared})


def test_last_two_versions_stay_readable(pair: Pair) -> None:
    sender, receiver = pair
    manifests = [sender.publish(version, weights(version).items()) for version in range(10)]
    assert_same(receive(receiver, manifests[-1]), weights(9))
    assert_same(receive(receiver, manifests[-2]), weights(8))


def test_reader_is_not_disturbed_by_later_versions(pair: Pair) -> None:
    sender, receiver = pair
    manifest = sender.publish(1, weights(1).items())
    with receiver.open(manifest) as tensors:
        first = next(tensors)
        for version in range(2, 6):
            sender.publish(version, weights(version).items())
        assert_same(dict([first, *tensors]), weights(1))


def test_versions_only_grow(pair: Pair) -> None:
    sender, _ = pair
    sender.publish(3, weights(3).items())
    with pytest.raises(ValueError, match="version 3 is not newer than 3"):
        sender.publish(3, weights(4).items())


def test_nothing_and_twice_the_same_name_are_refused(pair: Pair) -> None:
    sender, _ = pair
    with pytest.raises(ValueError, match="nothing to publish"):
        sender.publish(1, [])
    with pytest.raises(ValueError, match="a is published twice"):
        sender.publish(2, [("a", torch.ones(1)), ("a", torch.ones(1))])


def test_manifest_of_other_tensors_is_refused(pair: Pair) -> None:
    sender, receiver = pair
    manifest = sender.publish(1, weights(1).items())
    wrong = tuple(
        replace(info, dtype="bfloat16") if info.name == "scale" else info for info in manifest.tensors
    )
    with (
        pytest.raises(WeightTransportError, match="1 tensors are not those of the manifest, scale"),
        receiver.open(replace(manifest, tensors=wrong)),
    ):
        pass


def test_mixed_transports_are_explained(pair: Pair) -> None:
    sender, receiver = pair
    manifest = sender.publish(1, weights(1).items())
    other: Any = MessageReceiver() if isinstance(receiver, SharedMemoryReceiver) else SharedMemoryReceiver()
    with pytest.raises(WeightTransportError, match=r"same weights\.transport"), other.open(manifest):
        pass


def test_torn_message_is_detected() -> None:
    manifest = MessageSender().publish(1, weights(1).items())
    assert manifest.payload is not None
    flipped = bytearray(manifest.payload)
    flipped[-1] ^= 1
    for payload, reason in [(bytes(flipped), "checksum"), (manifest.payload[:-4], "bytes instead of")]:
        with (
            pytest.raises(WeightTransportError, match=reason),
            MessageReceiver().open(replace(manifest, payload=payload)),
        ):
            pass


Files = tuple[SharedMemorySender, SharedMemoryReceiver, Path]


@pytest.mark.parametrize(("damage", "reason"), [("flip", "checksum"), ("cut", "bytes instead of")])
def test_torn_file_is_detected(files: Files, damage: str, reason: str) -> None:
    sender, receiver, _ = files
    manifest = sender.publish(1, weights(1).items())
    path = Path(str(manifest.location))
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 4
    path.write_bytes(data if damage == "flip" else data[:-8])
    with pytest.raises(WeightTransportError, match=reason), receiver.open(manifest):
        pass


def test_missing_empty_and_swapped_files_are_explained(files: Files) -> None:
    sender, receiver, _ = files
    old, new = (sender.publish(version, weights(1).items()) for version in (1, 2))
    with (
        pytest.raises(WeightTransportError, match="holds version 1, not 2"),
        receiver.open(replace(old, version=2)),
    ):
        pass
    Path(str(new.location)).write_bytes(b"")
    with pytest.raises(WeightTransportError, match="version 2"), receiver.open(new):
        pass
    sender.publish(3, weights(3).items())
    with pytest.raises(WeightTransportError, match="only the last 2"), receiver.open(old):
        pass


def test_bounded_space_over_ten_versions(files: Files) -> None:
    sender, _, root = files
    one = sender.publish(0, weights(0).items()).nbytes
    for version in range(1, 10):
        sender.publish(version, weights(version).items())
        assert sum(p.stat().st_size for p in root.rglob("*") if p.is_file()) <= KEPT * one
    assert sender.folder is not None
    assert sorted(p.name for p in sender.folder.iterdir()) == ["lock", "v8.safetensors", "v9.safetensors"]


def test_close_leaves_nothing(files: Files) -> None:
    sender, _, root = files
    sender.publish(1, weights(1).items())
    assert list(root.iterdir())
    sender.close()
    sender.close()
    assert not list(root.iterdir())


@pytest.mark.parametrize("case", ["missing", "small"])
def test_falls_back_to_the_run_folder(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "shm"
    if case == "small":
        root.mkdir()
        usage = type("usage", (), {"free": 100})
        monkeypatch.setattr("forge_composer.weights.shared_memory.shutil.disk_usage", lambda _: usage)
    sender = SharedMemorySender(fallback=tmp_path / "run" / "weights", root=root)
    reason = "is missing or not writable" if case == "missing" else "MiB free"
    with pytest.warns(UserWarning, match=reason):
        manifest = sender.publish(1, weights(1).items())
    assert Path(str(manifest.location)).is_relative_to(tmp_path / "run" / "weights")
    assert_same(receive(SharedMemoryReceiver(), manifest), weights(1))
    sender.close()
    assert not list((tmp_path / "run" / "weights").iterdir())


OWNER = """
import sys, time
from pathlib import Path
import torch
from forge_composer.weights.shared_memory import SharedMemorySender
root = Path(sys.argv[1])
sender = SharedMemorySender(fallback=root / "x", root=root)
sender.publish(1, [("a", torch.ones(4))])
print(sender.folder, flush=True)
if sys.argv[2] == "stay":
    time.sleep(60)
"""


def _owner(root: Path, mode: str, checkout: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OWNER, str(root), mode]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_sweep_removes_folders_of_the_dead_only(tmp_path: Path, checkout: Path) -> None:
    owner = _owner(tmp_path, "stay", checkout)
    try:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        assert folder.is_dir()
        assert sweep(tmp_path) == []  # its owner lives
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert folder.is_dir()
    SharedMemorySender(fallback=tmp_path, root=tmp_path)
    assert not folder.exists()


def test_exit_without_close_leaves_nothing(tmp_path: Path, checkout: Path) -> None:
    owner = _owner(tmp_path, "leave", checkout)
    output, _ = owner.communicate(timeout=60)
    assert output.strip().startswith(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_vllm_transport_needs_cuda(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='"shared_memory" \\(one host\\) or "message"'):
        make_sender("vllm", fallback_dir=tmp_path, device="cpu")
    with pytest.raises(ValueError, match=r"weights\.transport"):
        make_receiver("vllm", device="cpu")


async def test_load_into_hands_the_version_and_tensors_to_the_engine(pair: Pair) -> None:
    class Engine:
        loaded: tuple[int, dict[str, torch.Tensor]] | None = None

        async def load_weights(self, version: int, named_tensors: Any) -> float:
            self.loaded = version, {name: tensor.clone() for name, tensor in named_tensors}
            return 0.25

        async def transfer_weights(self, version: int, init: Any, updates: Any) -> float:
            raise AssertionError("not for this transport")

    sender, receiver = pair
    engine = Engine()
    manifest = sender.publish(7, weights(7).items())
    assert await receiver.load_into(engine, manifest) == 0.25
    assert engine.loaded is not None
    assert engine.loaded[0] == 7
    assert_same(engine.loaded[1], weights(7))
    assert TensorInfo("scale", (), "float32") in manifest.tensors
