"""The pair buffer on disk, beside the checkpoint of the same step: `checkpoints/pairs-STEP.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_composer._files import write_whole


def save_pairs(folder: Path, step: int, state: Mapping[str, Any], *, keep: int) -> Path:
    """Write a saved buffer, whole or not at all; the newest `keep` files stay.

    Args:
        folder: the run's checkpoint folder; made if it is not there.
        step: of the checkpoint.
        state: what `PairBuffer.state_dict` gave.
        keep: files that stay, at least 1.
    """
    target = _path(folder, step)
    write_whole(target, json.dumps(state, ensure_ascii=False), errors="surrogatepass")
    for step_number in _steps(folder)[:-keep]:
        _path(folder, step_number).unlink(missing_ok=True)
    return target


def load_pairs(folder: Path, step: int) -> dict[str, Any] | None:
    """The saved buffer of a checkpoint; None if there is none.

    Raises:
        ValueError: the file is torn or holds no JSON object; the message names it.
    """
    path = _path(folder, step)
    if not path.is_file():
        return None
    try:
        state = json.loads(path.read_text(encoding="utf-8", errors="surrogatepass"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a whole saved pair buffer ({error}); remove the file") from error
    if not isinstance(state, dict):
        raise ValueError(f"{path}: not a saved pair buffer; remove the file")
    return state


def _path(folder: Path, step: int) -> Path:
    return folder / f"pairs-{step}.json"


def _steps(folder: Path) -> list[int]:
    """Steps with a file, in order."""
    stems = (path.stem.removeprefix("pairs-") for path in folder.glob("pairs-*.json"))
    return sorted(int(stem) for stem in stems if stem.isdecimal())
