"""The policy that reads both contexts, as transformers loads it.

Shape suffixes: N = targeted tokens, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_composer.inspection.records import InspectionError
from forge_composer.rendering.renderer import ChatRenderer


class Policy:
    """A causal language model with its tokenizer and chat template; without gradient."""

    def __init__(self, folder: Path, renderer: ChatRenderer, model: Any, device: torch.device) -> None:
        self.folder, self.renderer, self.device = folder, renderer, device
        self._model = model

    @classmethod
    def load(cls, folder: Path, device: str = "cpu") -> Policy:
        """Load a checkpoint folder: in float32 on a CPU, else in the folder's own dtype.

        Raises:
            InspectionError: there is no such device, or the folder holds no policy.
        """
        from transformers import AutoModelForCausalLM

        place = _device(device)
        if not folder.is_dir():
            raise InspectionError(f"{folder} is not a folder; name the policy's with --model FOLDER")
        try:
            renderer = ChatRenderer.from_folder(folder)
            model: Any = AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=torch.float32 if place.type == "cpu" else "auto", local_files_only=True
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise InspectionError(
                f"{folder} cannot be loaded as a policy: {reason}; name with --model a folder with "
                "config.json, safetensors, tokenizer and chat template"
            ) from error
        return cls(folder, renderer, model.to(place).eval(), place)

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """What the policy expects in some places, in one forward pass.

        Args:
            token_ids: the whole sequence.
            positions: indices of the tokens to predict, at least 1.

        Returns:
            [N, V] logits of the tokens at `positions` given those before them; no others are made.

        Raises:
            InspectionError: the policy has fewer tokens than the run used.
        """
        self._check(token_ids)
        ids = torch.tensor([token_ids[: positions[-1]]], device=self.device)
        predicting_N = torch.tensor(positions, device=self.device) - 1
        logits_NV: Tensor = self._model(input_ids=ids, use_cache=False, logits_to_keep=predicting_N).logits[0]
        return logits_NV if len(logits_NV) == len(positions) else logits_NV[predicting_N]

    def _check(self, token_ids: Sequence[int]) -> None:
        vocabulary = int(self._model.get_input_embeddings().num_embeddings)
        if max(token_ids) >= vocabulary:
            raise InspectionError(
                f"{self.folder}: the policy has {vocabulary} tokens, the run used token {max(token_ids)}; "
                "name with --model the run's policy or one trained from it"
            )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InspectionError(f"--device {name}: no device of torch; use cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InspectionError(f"--device {name}: torch {torch.__version__} sees no CUDA device; use cpu")
    return device
