"""Writing a policy as a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

_COPIED = {".json", ".jinja", ".txt", ".model"}
"""Suffixes of tokenizer, template and config files."""


def folder_dtype(source: Path) -> torch.dtype:
    """The dtype that a folder's `config.json` declares for its weights; float32 if it declares none."""
    content = json.loads((source / "config.json").read_text(encoding="utf-8"))
    name = content.get("dtype") or content.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{source / 'config.json'}: dtype = {name!r} is no dtype of PyTorch")
    return dtype


def write_hf_folder(source: Path, target: Path, state: dict[str, Tensor]) -> None:
    """Write `state` as safetensors beside copies of the source's config, tokenizer and chat template.

    The folder appears whole or not at all; one that is there already is replaced.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        for file in sorted(source.iterdir()):
            if file.is_file() and file.suffix in _COPIED and not file.name.endswith(".index.json"):
                shutil.copyfile(file, partial / file.name)
        _write_weights(partial, state)
        partial.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_weights(folder: Path, state: dict[str, Tensor]) -> None:
    """One `model.safetensors`, or several files of at most 5 GB with an index."""
    shards = split_torch_state_dict_into_shards(state)
    for name, tensors in shards.filename_to_tensors.items():
        save_file({key: state[key] for key in tensors}, folder / name, metadata={"format": "pt"})
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True)
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
