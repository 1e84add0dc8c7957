"""Keeps the folders at the top of a checkout from shadowing other distributions.

`kernels/`, `losses/` and `actors/` lie at the top of the repository and are imported as
`forge_composer.kernels` and so on, through symlinks. In a checkout, where Python searches the current
folder first, `import kernels` would still find our folder instead of Hugging Face's distribution of that
name. Each folder's `__init__` therefore calls `yield_name` when it is imported under its bare name.

Standard library only: it runs before anything else may be imported.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType


def yield_name(name: str, own_file: str) -> None:
    """Put the module that `import name` finds without our folder into `sys.modules[name]`.

    If there is none, an empty module without a file takes the place, as Python itself would put one for a
    plain folder of that name: code that probes for an optional dependency then sees that it is absent.
    Using anything of it raises ModuleNotFoundError with our real import name.

    Args:
        name: the bare name, such as `kernels`.
        own_file: `__file__` of our `__init__`, which is skipped in the search.
    """
    own = Path(own_file).resolve()
    for spec in _specs(name):
        if spec.origin is None or spec.loader is None or Path(spec.origin).resolve() == own:
            continue
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # the import system hands out what it finds here afterwards
        spec.loader.exec_module(module)
        return
    sys.modules[name] = _Absent(name)


def _specs(name: str) -> Iterator[ModuleSpec]:
    """Every spec that the finders have for a top-level name; `sys.path` entry by entry."""
    for finder in sys.meta_path:
        if finder is PathFinder:
            found = [PathFinder.find_spec(name, [entry]) for entry in sys.path]
        else:
            found = [finder.find_spec(name, None)]
        yield from (spec for spec in found if spec is not None)


class _Absent(ModuleType):
    """Stands for a distribution that is not installed. Not a package: submodules are not found."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, attribute: str) -> object:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        raise ModuleNotFoundError(
            f"no distribution with a module {self.__name__!r} is installed; this project's own package is "
            f"imported as 'forge_composer.{self.__name__}'",
            name=self.__name__,
        )
