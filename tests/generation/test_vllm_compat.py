"""The parts of the vLLM boundary that need no running engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from forge_composer.generation import vllm_compat

SETTINGS = (
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_LOGGING_LEVEL",
    "VLLM_NO_USAGE_STATS",
    "GLOO_LOG_LEVEL",
    "TORCHDYNAMO_DISABLE",
)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No setting made, vLLM and torch's compiler not imported; all of it restored afterwards."""
    for name in SETTINGS:
        monkeypatch.setenv(name, "")  # remembers the value to restore, also for a name that is not set
        monkeypatch.delenv(name)
    for module in ("vllm", "torch._dynamo.config"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return monkeypatch


def test_environment_is_prepared(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    vllm_compat.prepare_environment("cpu")
    assert {name: os.environ[name] for name in SETTINGS} == {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_LOGGING_LEVEL": "DEBUG",  # the user's own wish
        "VLLM_NO_USAGE_STATS": "1",
        "GLOO_LOG_LEVEL": "ERROR",
        "TORCHDYNAMO_DISABLE": "1",
    }


@pytest.mark.parametrize(("device", "eager"), [("cuda", True), ("cpu", False)])
def test_compiler_stays_on_where_it_is_wanted(clean: pytest.MonkeyPatch, device: str, eager: bool) -> None:
    vllm_compat.prepare_environment(device, eager=eager)
    assert "TORCHDYNAMO_DISABLE" not in os.environ


def test_vllm_imported_too_early_is_refused(clean: pytest.MonkeyPatch) -> None:
    clean.setitem(sys.modules, "vllm", ModuleType("vllm"))
    with pytest.raises(
        RuntimeError, match="VLLM_ENABLE_V1_MULTIPROCESSING must be 0 before vLLM is imported"
    ):
        vllm_compat.prepare_environment("cpu")


def test_contrary_setting_is_refused(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(RuntimeError, match="it is '1', and vLLM is not imported"):
        vllm_compat.prepare_environment("cpu")


def test_compat_module_does_not_import_vllm(checkout: Path) -> None:
    code = (
        "import sys, forge_composer.generation.engine, forge_composer.weights.transport\n"
        "assert 'vllm' not in sys.modules and 'monarch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(checkout)})


@pytest.mark.parametrize(
    ("text", "version"), [("0.29.0", (0, 29)), ("0.29.1+cpu", (0, 29)), ("1.2rc1", (1, 2))]
)
def test_version_of(text: str, version: tuple[int, int]) -> None:
    assert vllm_compat.version_of(text) == version


def test_version_of_nonsense() -> None:
    with pytest.raises(RuntimeError, match="'unknown'"):
        vllm_compat.version_of("unknown")


def test_packed_weights_are_found() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    assert vllm_compat.packed_weights(model) == []
    model[1].weight = torch.nn.Parameter(torch.empty(0))
    assert vllm_compat.packed_weights(model) == ["1.weight"]
