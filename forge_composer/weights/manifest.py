"""What a published policy version is: the note that the trainer hands to the generators."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import xxhash

if TYPE_CHECKING:
    from torch import Tensor

Transport = Literal["shared_memory", "message", "vllm"]


class WeightTransportError(RuntimeError):
    """Published weights cannot be had: gone, torn, or not those that the manifest describes."""


@dataclass(slots=True, frozen=True)
class TensorInfo:
    """One tensor of a policy version. `dtype` is torch's name for it, such as `bfloat16`."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorInfo:
        """The description of a tensor."""
        return cls(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


@dataclass(slots=True, frozen=True)
class WeightManifest:
    """A published policy version. Plain data: it is pickled into a message to each generator.

    `checksum` is the XXH3 (64 bit) of the `nbytes` serialised bytes; they are at `location` (a file) or in
    `payload`. `transfer` is what vLLM's weight-transfer API needs, for that transport.
    """

    version: int
    transport: Transport
    tensors: tuple[TensorInfo, ...]
    nbytes: int
    checksum: int = 0
    location: str | None = None
    payload: bytes | None = field(default=None, repr=False)
    transfer: dict[str, Any] | None = field(default=None, repr=False)


def checksum(data: Any) -> int:
    """XXH3 (64 bit) of a bytes-like object."""
    return xxhash.xxh3_64_intdigest(data)


def own_copies(named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Contiguous CPU tensors by name, no two of which share memory, as safetensors wants them.

    Raises:
        ValueError: no tensors, or a name comes twice.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in named_tensors:
        if name in tensors:
            raise ValueError(f"weights: {name} is published twice")
        plain = tensor.detach().cpu().contiguous()
        if plain.numel() and plain.untyped_storage().data_ptr() in seen:
            plain = plain.clone()
        seen.add(plain.untyped_storage().data_ptr())
        tensors[name] = plain
    if not tensors:
        raise ValueError("weights: there is nothing to publish")
    return tensors


def check_tensors(manifest: WeightManifest, found: Iterable[TensorInfo]) -> None:
    """Compare what was received with the manifest, in any order.

    Raises:
        WeightTransportError: a tensor is missing, unknown, or of another shape or dtype.
    """
    differing = set(manifest.tensors) ^ set(found)
    if differing:
        names = sorted({info.name for info in differing})
        raise WeightTransportError(
            f"weights of version {manifest.version}: {len(names)} tensors are not those of the manifest, "
            f"{names[0]} first"
        )
