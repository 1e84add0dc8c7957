"""Supervised warm-up of the tiny policy, in one process: traces in, a Hugging Face folder out."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset

from forge_composer.envs.micro_grammar import Difficulty
from forge_composer.rendering.renderer import ChatRenderer
from forge_composer.warmup.tokenizer import END_OF_TEXT, TURN_END, train_tokenizer
from forge_composer.warmup.traces import (
    PracticeIds,
    WarmupSkill,
    make_traces,
    practice_pairs,
    trace_ids,
    trace_texts,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM


@dataclass(slots=True, frozen=True)
class WarmupConfig:
    """Sizes and schedule. The defaults made the policy in `assets/tiny_policy`."""

    difficulty: Difficulty = "easy"
    seed: int = 0
    vocab_size: int = 768
    layers: int = 4
    hidden: int = 128
    intermediate: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    max_positions: int = 2048
    init_std: float = 0.05
    """Standard deviation of the initial weights; transformers' default of 0.02 is for far wider models."""
    lr: float = 2e-3
    warmup: int = 100
    batch_pairs: int = 64
    batch_tokens: int = 4096
    practice_steps: int = 300
    """Steps on practice pairs, from the sentence to the body and from the hint to the body: a fifth of the
    tokens of a trace. Copying appears rather suddenly, after about 100 steps; the traces then keep it."""
    phases: tuple[tuple[int, WarmupSkill], ...] = (
        (150, WarmupSkill(first_right=1.0, correction_right=1.0, bare_share=0.5, hint_share=0.5)),
        (200, WarmupSkill()),
    )
    """(steps, skill) on traces: flawless ones first, then those of the agent that it is to be."""
    constant_share: float = 0.6
    """Share of the steps before the learning rate falls, linearly to 0."""
    prompt_weight: float = 0.1
    """Weight of the loss on tokens that the agent did not write, relative to its own."""

    @classmethod
    def obedient(cls, seed: int = 0) -> WarmupConfig:
        """Going on from the tiny policy: to follow demonstrations, and nothing about the tasks.

        Nine demonstrations in ten show another function's body, and are obeyed; the attempts without one are
        right as often as before.
        """
        skill = WarmupSkill(hint_share=0.7, feedback_hints=0.05, other_body=0.9, obeyed=1.0)
        return cls(seed=seed + 100, lr=1e-3, warmup=20, practice_steps=100, phases=((300, skill),))

    @classmethod
    def novice(cls, seed: int = 0) -> WarmupConfig:
        """Going on from an obedient policy: it still follows demonstrations, and without one is hardly ever
        right. What it writes then is the body of a similar function: a reward that is rare from the start.
        """
        skill = WarmupSkill(
            first_right=0.02,
            correction_right=0.02,
            hint_share=0.5,
            feedback_hints=0.05,
            other_body=0.9,
            obeyed=1.0,
        )
        return cls(seed=seed + 200, lr=1e-3, warmup=20, practice_steps=0, phases=((200, skill),))

    @property
    def steps(self) -> int:
        """Optimizer steps in all."""
        return self.practice_steps + sum(steps for steps, _ in self.phases)


def build_tokenizer(config: WarmupConfig, traces: int = 600) -> PreTrainedTokenizerFast:
    """Train the tokenizer on the texts of the first traces."""
    stream = itertools.islice(make_traces(config.difficulty, WarmupSkill(), config.seed), traces)
    return train_tokenizer((text for trace in stream for text in trace_texts(trace)), config.vocab_size)


def build_model(config: WarmupConfig, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A randomly initialised Qwen3 with tied embeddings, float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(config.seed)
    model: Any = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden,
            intermediate_size=config.intermediate,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=True,
            initializer_range=config.init_std,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            bos_token_id=None,
            eos_token_id=_token_id(tokenizer, TURN_END),
            pad_token_id=_token_id(tokenizer, END_OF_TEXT),
            dtype="float32",
        )
    )
    return model  # type: ignore[no-any-return]


def _token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    return int(tokenizer.vocab[token])


Example = tuple[list[int], list[bool]]
"""Token ids, and which of them the agent wrote."""
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Padded ids [B, T], attention mask [B, T], loss weights [B, T] (0 in padding)."""


def batches(config: WarmupConfig, renderer: ChatRenderer, pad_id: int) -> Iterator[Batch]:
    """All batches, in order: practice, then the phases of traces."""
    practice = _practice_examples(config, renderer)
    for _ in range(config.practice_steps):
        yield _collate(list(itertools.islice(practice, config.batch_pairs)), config, pad_id)
    for phase, (steps, skill) in enumerate(config.phases):
        traces = make_traces(config.difficulty, skill, config.seed + 1 + phase)
        examples = (trace_ids(trace, renderer) for trace in traces)
        for _ in range(steps):
            yield _collate(_fill(examples, config.batch_tokens), config, pad_id)


def _practice_examples(config: WarmupConfig, renderer: ChatRenderer) -> Iterator[Example]:
    ids = PracticeIds(renderer)
    for number, (head, hint, body) in enumerate(practice_pairs(config.difficulty, config.seed)):
        yield ids(head, hint, body, own_message=number % 4 == 1)


def _fill(examples: Iterator[Example], tokens: int) -> list[Example]:
    """Examples until the padded batch holds so many tokens."""
    rows: list[Example] = []
    longest = 0
    while (len(rows) + 1) * longest < tokens:
        rows.append(next(examples))
        longest = max(longest, len(rows[-1][0]))
    return rows


def _collate(rows: list[Example], config: WarmupConfig, pad_id: int) -> Batch:
    longest = max(len(ids) for ids, _ in rows)
    ids_BT = torch.full((len(rows), longest), pad_id)
    mask_BT = torch.zeros((len(rows), longest), dtype=torch.long)
    weight_BT = torch.zeros((len(rows), longest))
    for row, (ids, own) in enumerate(rows):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        mask_BT[row, : len(ids)] = 1
        weight_BT[row, : len(ids)] = torch.where(torch.tensor(own), 1.0, config.prompt_weight)
    return ids_BT, mask_BT, weight_BT


class _Batches(IterableDataset[Batch]):
    """The batches, made in a process of their own: a task takes as long as a step."""

    def __init__(self, config: WarmupConfig, renderer: ChatRenderer, pad_id: int) -> None:
        self.arguments = config, renderer, pad_id

    def __iter__(self) -> Iterator[Batch]:
        return batches(*self.arguments)


def _rate(config: WarmupConfig, step: int) -> float:
    """The learning rate of a step, as a share: up, level, down."""
    left = (config.steps - step) / (config.steps * (1.0 - config.constant_share))
    return min(1.0, (step + 1) / config.warmup, left)


def train(
    config: WarmupConfig,
    folder: Path,
    report: Callable[[int, float, float], None] = lambda *_: None,
    *,
    start: Path | None = None,
) -> None:
    """Train and write a Hugging Face folder (weights, config, tokenizer, chat template).

    Args:
        config: what to train.
        folder: where to write.
        report: called each step with (step, loss in nats per token, seconds so far).
        start: folder of a policy to go on from; None: a new tokenizer and random weights.
    """
    if start is None:
        tokenizer = build_tokenizer(config)
        model = build_model(config, tokenizer)
    else:
        tokenizer, model = load(start)
    renderer = ChatRenderer(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(config, step))
    began = time.perf_counter()
    model.train()
    stream = _Batches(config, renderer, _token_id(tokenizer, END_OF_TEXT))
    loader = DataLoader(stream, batch_size=None, num_workers=1, prefetch_factor=16)
    for step, (ids_BT, mask_BT, weight_BT) in enumerate(loader):
        logits_BTV = model(input_ids=ids_BT, attention_mask=mask_BT).logits
        loss_N = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none")
        weight_N = weight_BT[:, 1:].flatten()
        loss = (loss_N * weight_N).sum() / weight_N.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        report(step, loss.item(), time.perf_counter() - began)
        if (step + 1) % 250 == 0:
            save(model, tokenizer, folder)
    save(model, tokenizer, folder)


def load(folder: Path) -> tuple[PreTrainedTokenizerFast, Qwen3ForCausalLM]:
    """Tokenizer and model of a folder that `save` wrote."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return tokenizer, model


def save(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a checkpoint folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
