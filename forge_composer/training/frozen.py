"""A policy that is scored and never trained: the reference of KL terms and of preference pairs.

Shape suffixes: R = rows, L = positions, N = selected tokens.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from forge_composer.config.schema import TrainerConfig
from forge_composer.training import titan
from forge_composer.training.lm_head import HeadReader
from forge_composer.training.model import PolicyModel, load_hf
from forge_composer.training.setup import build_model


class FrozenPolicy:
    """A copy of the policy, sharded like the one in training, with the weights of a folder."""

    def __init__(
        self,
        folder: Path,
        model_config: PolicyModel.Config,
        config: TrainerConfig,
        parallel_dims: titan.ParallelDims,
        device: torch.device,
    ) -> None:
        """Build the model and load its weights. A collective.

        Raises:
            ValueError: the folder's weights do not fit the config.
        """
        unwrapped = config.model_copy(update={"activation_checkpointing": "none"})
        self.model = build_model(model_config, unwrapped, parallel_dims, device)
        load_hf(self.model, folder)
        self.model.requires_grad_(False).eval()

    @torch.no_grad()
    def read(
        self, token_ids_RL: Tensor, positions_RL: Tensor, select_N: Tensor, reader: HeadReader
    ) -> tuple[Tensor, ...]:
        """What `reader` makes of the hidden states at the selected positions. A collective."""
        result: tuple[Tensor, ...] = self.model(
            token_ids_RL,
            positions_BL=positions_RL,
            attention_masks=self.model.get_attention_masks(positions_RL),
            select_N=select_N,
            reader=reader,
        )
        self.reshard()
        return result

    def reshard(self) -> None:
        """Let go of gathered weights: without a backward pass FSDP keeps those of its root."""
        for module in titan.fsdp_modules(self.model):
            module.reshard()
