"""Dependencies between the parts flow one way, and heavy libraries stay in the modules that own them."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("kernels", "losses", "domain", "actors", "apps")
"""From the bottom up: a layer imports itself and those before it."""

FOUNDATIONS = ("forge_composer._layout.yield_name", "forge_composer._section.Section")
"""What every layer may import: neither imports anything of ours."""

OWNERS = {
    "torchtitan": ("forge_composer/training/",),
    "vllm": ("forge_composer/generation/", "forge_composer/weights/vllm_transfer.py"),
    "monarch": ("actors/", "apps/"),
    "torchstore": ("actors/",),
}
"""Where a library may be imported, at all or inside a function."""


def modules() -> list[Path]:
    """Our modules, by their real paths relative to the root."""
    found = [
        file for folder in ("kernels", "losses", "actors", "apps") for file in (ROOT / folder).rglob("*.py")
    ]
    linked = {ROOT / "forge_composer" / name for name in ("kernels", "losses", "actors")}
    for file in (ROOT / "forge_composer").rglob("*.py"):
        if not linked & set(file.parents):
            found.append(file)
    return sorted(file.relative_to(ROOT) for file in found)


def layer_of_name(name: str) -> str | None:
    """The layer of an import name of ours, None for a name of others."""
    parts = name.split(".")
    if parts[0] == "apps":
        return "apps"
    if parts[0] != "forge_composer":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ("kernels", "losses", "actors") else "domain"


def layer_of_file(file: Path) -> str:
    return "domain" if file.parts[0] == "forge_composer" else file.parts[0]


def import_name(file: Path) -> str:
    parts = file.with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    prefix = () if parts[0] in ("forge_composer", "apps") else ("forge_composer",)
    return ".".join((*prefix, *parts))


def imports(file: Path) -> Iterator[str]:
    """Every name that a module imports, also inside functions; relative ones made absolute."""
    package = import_name(file).split(".")
    if file.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from forge_composer import actors` imports a module of that name, too.
            yield from (f"{module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("file", modules(), ids=str)
def test_imports(file: Path) -> None:
    own = LAYERS.index(layer_of_file(file))
    for name in imports(file):
        top = name.partition(".")[0]
        layer = layer_of_name(name)
        if name in FOUNDATIONS:
            continue
        if layer is not None:
            assert LAYERS.index(layer) <= own, f"{file} imports {name}: dependencies flow up only"
        assert top not in ("kernels", "losses", "actors"), (
            f"{file} imports {name}: write forge_composer.{top}"
        )
        assert top != "tests", f"{file} imports {name}"
        if top in OWNERS:
            assert str(file).startswith(OWNERS[top]), (
                f"{file} imports {name}, which belongs into {OWNERS[top]}"
            )


def test_the_walk_sees_every_layer_and_resolves_names() -> None:
    assert {layer_of_file(file) for file in modules()} == set(LAYERS)
    assert import_name(Path("kernels/jsd.py")) == "forge_composer.kernels.jsd"
    assert import_name(Path("forge_composer/config/__init__.py")) == "forge_composer.config"
    assert "forge_composer.config.errors.Problem" in set(imports(Path("forge_composer/config/__init__.py")))
    assert layer_of_name("forge_composer.actors.trainer") == "actors"
    assert layer_of_name("forge_composer.config.load") == "domain"
    assert layer_of_name("torch.nn") is None


@pytest.mark.parametrize("name", ["kernels", "losses", "actors"])
def test_folders_are_linked_into_the_package(name: str) -> None:
    link = ROOT / "forge_composer" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name


def test_every_folder_of_modules_is_a_package() -> None:
    for file in modules():
        assert (ROOT / file.parent / "__init__.py").exists(), f"{file.parent} has no __init__.py"


def test_lock_holds_every_dependency_and_no_machine_path() -> None:
    def key(requirement: str) -> str:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        assert name is not None, requirement
        return re.sub(r"[-_.]+", "-", name.group()).lower()

    lines = (ROOT / "requirements" / "cpu.lock").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9.-]+==[A-Za-z0-9.!]+", pin) for pin in pins)
    locked = dict(pin.split("==") for pin in pins)
    assert len(locked) == len(pins)
    assert not {"torchvision", "torchaudio", "torchcodec", "vllm"} & set(locked)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    wanted += [
        line for line in (ROOT / "requirements" / "cpu.in").read_text().splitlines() if line[:1].isalnum()
    ]
    for requirement in wanted:
        assert key(requirement) in locked, requirement
        if exact := re.search(r"==([\w.]+)$", requirement):
            assert locked[key(requirement)] == exact.group(1)
    assert "vllm" not in {key(requirement) for requirement in project["dependencies"]}
