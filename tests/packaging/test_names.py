"""Import names: ours are `forge_composer.*`, `kernels` is Hugging Face's, nothing is loaded twice."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

SITE = Path(sysconfig.get_paths()["purelib"])

# Prints what the names lead to, and files of ours that were loaded under more than one name.
PROBE = """
import collections, importlib, json, pkgutil, sys
from pathlib import Path
from kernels import get_kernel
import kernels
import kernels.layer
import forge_composer, forge_composer.kernels, forge_composer.losses, forge_composer.actors
for package in (forge_composer.kernels, forge_composer.losses):
    for found in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{found.name}")
root = Path(sys.argv[1]).resolve()
names = collections.defaultdict(list)
for name, module in list(sys.modules.items()):
    file = getattr(module, "__file__", None)
    if file and Path(file).resolve().is_relative_to(root) and "site-packages" not in Path(file).parts:
        names[str(Path(file).resolve())].append(name)
print(json.dumps({
    "kernels": kernels.__file__,
    "layer": kernels.layer.__file__,
    "get_kernel": get_kernel.__module__,
    "ours": forge_composer.kernels.__file__,
    "same": kernels is forge_composer.kernels,
    "twice": {file: found for file, found in names.items() if len(found) > 1},
    "loaded": len(names),
}))
"""


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False
    )


def check_probe(answer: subprocess.CompletedProcess[str], ours: Path) -> None:
    assert answer.returncode == 0, answer.stderr
    seen = json.loads(answer.stdout)
    assert Path(seen["kernels"]) == SITE / "kernels" / "__init__.py"
    assert Path(seen["layer"]).is_relative_to(SITE / "kernels")
    assert seen["get_kernel"].startswith("kernels")
    assert Path(seen["ours"]) == ours / "forge_composer" / "kernels" / "__init__.py"
    assert not seen["same"]
    assert seen["twice"] == {}
    assert seen["loaded"] >= 4


def test_hugging_face_kernels_is_installed() -> None:
    assert importlib.metadata.version("kernels")


def test_checkout_as_current_folder(checkout: Path) -> None:
    check_probe(run("-c", PROBE, str(checkout), cwd=checkout), checkout)


def test_checkout_on_pythonpath(checkout: Path, tmp_path: Path) -> None:
    answer = run("-c", PROBE, str(checkout), cwd=tmp_path, PYTHONPATH=str(checkout))
    check_probe(answer, checkout)


def test_apps_is_importable_in_a_checkout_only(checkout: Path, tmp_path: Path) -> None:
    code = "import apps; print(apps.__file__)"
    assert run("-c", code, cwd=checkout).stdout.strip() == str(checkout / "apps" / "__init__.py")
    assert "No module named 'apps'" in run("-c", code, cwd=tmp_path).stderr


def test_under_pytest() -> None:
    import kernels

    import forge_composer.kernels

    assert kernels.__file__ == str(SITE / "kernels" / "__init__.py")
    assert kernels is not forge_composer.kernels
    assert hasattr(kernels, "get_kernel")


@pytest.mark.parametrize("name", ["losses", "actors"])
def test_a_name_that_no_distribution_has(checkout: Path, name: str) -> None:
    code = f"import {name}; print(getattr({name}, '__file__', None)); from {name} import grpo"
    answer = run("-c", code, cwd=checkout)
    assert answer.stdout.strip() == "None"
    assert answer.returncode == 1
    assert f"own package is imported as 'forge_composer.{name}'" in answer.stderr
    answer = run("-c", f"import {name}.grpo", cwd=checkout)
    assert f"No module named '{name}.grpo'" in answer.stderr


TRANSFORMERS = """
from transformers.utils.import_utils import _is_package_available as available, is_kernels_available
print(available("kernels", return_version=True), is_kernels_available())
"""


def test_transformers_sees_kernels_as_it_does_elsewhere(checkout: Path, tmp_path: Path) -> None:
    here, elsewhere = (run("-c", TRANSFORMERS, cwd=folder).stdout for folder in (checkout, tmp_path))
    assert here == elsewhere
    assert here.startswith(f"(True, '{importlib.metadata.version('kernels')}')")


def test_transformers_sees_that_kernels_is_not_installed(checkout: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    for entry in SITE.iterdir():
        lost = entry.name == "kernels" or entry.name.startswith(("kernels-", "__editable__", "distutils-pre"))
        if not lost and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    blind = f"import sys; sys.path[1:] = [p for p in sys.path[1:] if p != {str(SITE)!r}] + [{str(site)!r}]\n"
    answer = run("-S", "-c", blind + TRANSFORMERS, cwd=checkout)
    assert answer.stdout.strip() == "(False, 'N/A') False", answer.stderr
    answer = run("-S", "-c", blind + "from kernels import get_kernel", cwd=checkout)
    assert "ModuleNotFoundError" in answer.stderr
    assert "'forge_composer.kernels'" in answer.stderr


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: setuptools writes into the source folder."""
    source = tmp_path_factory.mktemp("build") / "source"
    kept = ("forge_composer", "kernels", "losses", "actors", "apps", "configs", "tests", "requirements")
    for name in kept:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(checkout / name, source / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(checkout / name, source / name)
    out = source.parent / "dist"
    pip = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), ".")
    built = run(*pip, cwd=source)
    assert built.returncode == 0, built.stderr
    (found,) = out.glob("forge_composer-*.whl")
    return found


@pytest.mark.slow
def test_wheel_holds_our_package_and_nothing_beside_it(wheel: Path, checkout: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"forge_composer", next(top for top in tops if top.endswith(".dist-info"))}
    sources = {
        str(file.relative_to(checkout))
        for folder in (
            "forge_composer",
            "forge_composer/kernels",
            "forge_composer/losses",
            "forge_composer/actors",
        )
        for file in (checkout / folder).rglob("*.py")
    }
    assert "forge_composer/kernels/__init__.py" in sources
    assert {name for name in names if name.endswith(".py")} == sources
    assert "forge_composer/py.typed" in names


@pytest.mark.slow
def test_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel))
    assert run(*pip, cwd=tmp_path).returncode == 0
    answer = run("-c", PROBE, str(target), cwd=tmp_path, PYTHONPATH=str(target))
    check_probe(answer, target)
    gone = run("-c", "import apps", cwd=tmp_path, PYTHONPATH=str(target))
    assert "No module named 'apps'" in gone.stderr
