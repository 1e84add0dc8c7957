"""Compiles the launches of the Triton kernels ahead of time, for GPUs that are not there."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
REGISTERS = 65536
"""Of a multiprocessor; handed out in units of 256 a warp."""


class Launch(NamedTuple):
    """A launch as the host code asked for it."""

    kernel: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Usage(NamedTuple):
    """What a compiled kernel takes."""

    name: str
    capability: int
    warps: int
    ctas: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    ptx: str

    @property
    def resident(self) -> int:
        """Programs (thread blocks of a cluster) that the registers of a multiprocessor have room for."""
        of_a_warp = -(-self.registers * 32 // 256) * 256
        return min(REGISTERS // (of_a_warp * self.warps), 64 // self.warps, 32)


@contextmanager
def recorded_launches(monkeypatch: pytest.MonkeyPatch, module: Any) -> Iterator[list[Launch]]:
    """Within it, the module's kernels are not launched but listed."""
    launches: list[Launch] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kwargs: launches.append(Launch(self.kernel, args, kwargs))

    with monkeypatch.context() as patch:
        for name, value in vars(module).copy().items():
            if name.endswith("_kernel") and isinstance(value, triton.JITFunction):
                patch.setattr(module, name, Recorder(value))
        yield launches


def compile_launch(launch: Launch, capability: int) -> Usage:
    """Compile as a launch with these arguments would, down to machine code."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    hints: dict[tuple[int], list[list[Any]]] = {}
    options = dict(launch.kwargs)
    names = launch.kernel.arg_names
    arguments = dict(zip(names, launch.args, strict=False))
    arguments |= {name: options.pop(name) for name in names if name in options}
    for index, name in enumerate(names):
        value = arguments[name]
        if isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            aligned = value.data_ptr() % 16 == 0
        elif isinstance(value, float):
            signature[name], aligned = "fp32", False
        elif isinstance(value, int) and not isinstance(value, bool) and value != 1 and not name.isupper():
            signature[name], aligned = ("i32" if abs(value) < 2**31 else "i64"), value % 16 == 0
        else:
            signature[name], constants[name], aligned = "constexpr", value, False
        if aligned:
            hints[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature=signature, constexprs=constants, attrs=hints)
    target = GPUTarget("cuda", capability, 32)
    options = {name: value for name, value in options.items() if value is not None}
    compiled: Any = triton.compile(source, target=target, options=options)
    registers, spilled = assemble(compiled.asm["ptx"], capability)
    return Usage(
        launch.kernel.__name__,
        capability,
        compiled.metadata.num_warps,
        compiled.metadata.num_ctas,
        registers,
        spilled,
        compiled.metadata.shared,
        compiled.asm["ptx"],
    )


def assemble(ptx: str, capability: int) -> tuple[int, int]:
    """Registers a thread and bytes that are spilled, from the assembler that comes with Triton."""
    with TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", "--fmad=false", "--regAllocOptLevel=2"]
        command += [f"--gpu-name={sm_arch_from_capability(capability)}", str(source), "-o", f"{folder}/out"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", log)
    spilled = re.search(r"(\d+) bytes spill stores", log)
    assert registers is not None, log
    assert spilled is not None, log
    return int(registers[1]), int(spilled[1])
