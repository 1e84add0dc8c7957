"""Attention within documents by scaled-dot-product attention: any device, any dtype, no mask.

Shape suffixes: B = rows, L = positions, T = B x L, N = heads (of queries; keys and values have fewer),
H = head dimension.

torchtitan's own inner attentions need CUDA to train: flex attention has no CPU backward, varlen attention
no CPU kernel. Cutting the packed rows at the document boundaries and attending causally within each piece
costs the sum of the squared document lengths instead of the squared row length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from forge_composer.training.titan import Module


class DocumentSpans(NamedTuple):
    """Consecutive pieces of the flattened rows.

    A piece is one document, or a run of documents of one token each (padding), in which every token attends
    to itself alone.
    """

    lengths: tuple[int, ...]
    single_tokens: tuple[bool, ...]


def document_spans(positions_BL: Tensor) -> DocumentSpans:
    """The pieces of packed rows, whose documents start where the position is 0."""
    flat = positions_BL.detach().reshape(-1).cpu()
    starts = torch.nonzero(flat == 0)[:, 0].tolist()
    lengths: list[int] = []
    single: list[bool] = []
    for start, stop in zip(starts, [*starts[1:], flat.numel()], strict=True):
        if stop - start == 1 and single and single[-1]:
            lengths[-1] += 1
        else:
            lengths.append(stop - start)
            single.append(stop - start == 1)
    return DocumentSpans(tuple(lengths), tuple(single))


class DocumentAttention(Module):  # type: ignore[misc]  # torchtitan ships no types
    """Inner attention over `DocumentSpans`; takes the place of torchtitan's flex or varlen attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        """No options."""

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: DocumentSpans,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_: Any,
    ) -> Tensor:
        """Attend within each document. The names of the tensors are those torchtitan's sharding looks for."""
        pieces_TNH = (t.flatten(0, 1).split(list(attention_masks.lengths)) for t in (q_BLNH, k_BLNH, v_BLNH))
        out = []
        for q, k, v, single in zip(*pieces_TNH, attention_masks.single_tokens, strict=True):
            # As batches of documents: one of T tokens, or T of one token. The latter could be v itself, but
            # then a rank that has nothing but padding would give FSDP no gradient of q and k to reduce.
            q, k, v = (t[:, :, None] if single else t.transpose(0, 1)[None] for t in (q, k, v))
            attended = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa
            )
            out.append(attended[:, :, 0] if single else attended[0].transpose(0, 1))
        return torch.cat(out).view_as(q_BLNH)
