"""Weights inside the manifest: any number of hosts, no set-up, as slow as messages are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from safetensors.torch import load, save
from torch import Tensor

from forge_composer.weights.manifest import (
    TensorInfo,
    WeightManifest,
    WeightTransportError,
    check_tensors,
    checksum,
    own_copies,
)
from forge_composer.weights.transport import TensorReceiver, WeightSender


class MessageSender(WeightSender):
    """Serialises each version into its manifest; keeps nothing."""

    def __init__(self) -> None:
        self._version: int | None = None

    def publish(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> WeightManifest:
        """See `WeightSender.publish`."""
        self._version = newer(version, self._version)
        tensors = own_copies(named_tensors)
        payload = save(tensors)
        return WeightManifest(
            version=version,
            transport="message",
            tensors=tuple(TensorInfo.of(name, tensor) for name, tensor in tensors.items()),
            nbytes=len(payload),
            checksum=checksum(payload),
            payload=payload,
        )

    def close(self) -> None:
        """Nothing to take back."""


class MessageReceiver(TensorReceiver):
    """Reads the tensors out of the manifest."""

    @contextmanager
    def open(self, manifest: WeightManifest) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """See `TensorReceiver.open`."""
        if manifest.payload is None:
            raise WeightTransportError(
                f"weights of version {manifest.version}: the manifest ({manifest.transport}) carries no "
                "tensors; trainer and generators must use the same weights.transport"
            )
        verify(manifest, manifest.payload)
        tensors = load(manifest.payload)
        check_tensors(manifest, (TensorInfo.of(name, tensor) for name, tensor in tensors.items()))
        yield iter(tensors.items())


def newer(version: int, last: int | None) -> int:
    """`version`, if it is newer than the last published.

    Raises:
        ValueError: it is not.
    """
    if last is not None and version <= last:
        raise ValueError(f"weights: version {version} is not newer than {last}, which is published")
    return version


def verify(manifest: WeightManifest, data: bytes | memoryview) -> None:
    """Compare serialised weights with the manifest's size and checksum.

    Raises:
        WeightTransportError: they differ.
    """
    if len(data) != manifest.nbytes:
        raise WeightTransportError(
            f"weights of version {manifest.version} are torn: {len(data)} bytes instead of {manifest.nbytes}"
        )
    if checksum(data) != manifest.checksum:
        raise WeightTransportError(
            f"weights of version {manifest.version} are torn: the checksum does not match"
        )
