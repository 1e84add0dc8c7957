"""What the SDPO channel adds to a step with targets on a quarter of the turns: time and peak memory.

    python benchmarks/sdpo_cost.py --json benchmarks/results/sdpo_cost.json

One process, one rank, the same batch for every trainer: GRPO alone, and GRPO with SDPO for each kind of
teacher. Steps alternate between the trainers, so that what else the machine does falls on all of them. A
rollout has four turns (64 sampled tokens behind 32 of an observation, after a prompt of 128); one turn of
each, at random, has a target with a hint of 32 tokens. Peak memory is that of a step beyond what stays, and
with weights, moments and the teacher's copy."""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

KINDS = ("grpo", "live", "ema", "trust_region")
PROMPT, OBSERVATION, ACTION, TURNS, HINT = 128, 32, 64, 4, 32
LENGTH = PROMPT + TURNS * (OBSERVATION + ACTION)


def make_samples(rollouts: int, vocab: int, *, targets: bool) -> list[Any]:
    """One sample a rollout; with a target, one turn in four is distilled."""
    from forge_composer.hints.records import DistillTarget
    from forge_composer.types import TrainingSample

    draw = random.Random(0)
    samples = []
    for number in range(rollouts):
        mask = [False] * PROMPT + ([False] * OBSERVATION + [True] * ACTION) * TURNS
        ids = [draw.randrange(vocab) for _ in range(LENGTH)]
        sample = TrainingSample(
            rollout_id=f"rollout-{number}",
            token_ids=ids,
            action_mask=mask,
            logprobs=[-10.0 if on else 0.0 for on in mask],
            versions=[0 if on else -1 for on in mask],
            advantages=[draw.uniform(-1.0, 1.0)] * LENGTH,
        )
        first = PROMPT + draw.randrange(TURNS) * (OBSERVATION + ACTION) + OBSERVATION
        positions = list(range(first, first + ACTION))
        hint = [draw.randrange(vocab) for _ in range(HINT)]
        if targets:
            sample.targets = [
                DistillTarget(
                    rollout_id=sample.rollout_id,
                    turn=0,
                    kind="bench",
                    source="bench",
                    sample_index=0,
                    positions=positions,
                    teacher_ids=[*ids[:first], *hint, *ids[first : first + ACTION]],
                    teacher_positions=[position + HINT for position in positions],
                )
            ]
        samples.append(sample)
    return samples


def make_trainer(options: argparse.Namespace, model: Path, output: Path, kind: str) -> Any:
    """GRPO alone, or with a teacher of a kind."""
    from forge_composer.config.schema import LossConfig, ModelConfig, TrainerConfig
    from forge_composer.losses.config import SDPOConfig
    from forge_composer.training.policy_trainer import PolicyTrainer

    sdpo = SDPOConfig() if kind == "grpo" else SDPOConfig(weight=1.0, teacher=kind)  # type: ignore[arg-type]
    config = TrainerConfig(
        dtype="float32",
        seq_len=LENGTH + HINT,
        rows_per_microbatch=options.rows,
        logits_memory_mib=options.budget_mib,
    )
    return PolicyTrainer(
        config,
        ModelConfig(path=model),
        LossConfig(sdpo=sdpo),
        temperature=1.0,
        max_completion_tokens=TURNS * ACTION,
        total_steps=1000,
        seed=0,
        output_dir=output,
        device=options.device,
    )


def measure(options: argparse.Namespace, model: Path, output: Path) -> list[dict[str, Any]]:
    """All trainers, step by step in turn."""
    import torch

    from forge_composer.batching.packing import pack_samples
    from forge_composer.bench.memory import peak_extra_bytes

    device = torch.device(options.device)
    trainers = {kind: make_trainer(options, model, output / kind, kind) for kind in KINDS}
    batches = {
        kind: pack_samples(
            make_samples(options.rollouts, options.vocab, targets=kind != "grpo"),
            seq_len=LENGTH + HINT,
            dp_degree=1,
            rows_per_microbatch=options.rows,
            version=0,
        )
        for kind in KINDS
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(options.steps + 1):
        for kind in KINDS:
            began = time.perf_counter()
            trainers[kind].train_step(batches[kind])
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[kind].append(time.perf_counter() - began)
    rows = []
    for kind in KINDS:
        trainer, batch = trainers[kind], batches[kind]
        resident = 4 * trainer.num_parameters * (3 if kind in ("grpo", "live") else 4)
        peak = peak_extra_bytes(lambda trainer=trainer, batch=batch: trainer.train_step(batch), device)
        rows.append(
            {
                "kind": kind,
                "step_s": statistics.median(seconds[kind][1:]),
                "steps_s": seconds[kind][1:],
                "tokens": batch.total_tokens,
                "tokens_distilled": batch.teacher.num_tokens,
                "parameters": trainer.num_parameters,
                "resident_bytes": resident,  # float32 weights, two moments, the teacher's copy
                "peak_extra_bytes": peak,
            }
        )
    for trainer in trainers.values():
        trainer.close()
    base = rows[0]
    for row in rows:
        pairs = zip(row["steps_s"], base["steps_s"], strict=True)
        row["time_ratio"] = statistics.median(mine / theirs for mine, theirs in pairs)
        row["memory_ratio"] = (row["resident_bytes"] + row["peak_extra_bytes"]) / (
            base["resident_bytes"] + base["peak_extra_bytes"]
        )
    return rows


def main() -> None:
    """Run all trainers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--rows", type=int, default=8, help="rows of a micro-batch")
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--budget_mib", type=int, default=256, help="trainer.logits_memory_mib")
    options = parser.parse_args()

    import torch
    from train_step_memory import make_model

    from forge_composer.bench.machine import describe_machine

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model, options.vocab, options.hidden, options.layers)
        rows = measure(options, model, Path(folder))
    settings = {name: value for name, value in vars(options).items() if name not in ("json", "device")}
    report = {"machine": describe_machine(torch.device(options.device)), "settings": settings, "rows": rows}
    text = json.dumps(report, indent=2)
    for row in rows:
        print(
            f"{row['kind']:>12}: {row['step_s']:.2f} s ({row['time_ratio']:.2f}), extra "
            f"{row['peak_extra_bytes'] / 2**20:,.0f} MiB, with what stays {row['memory_ratio']:.2f}"
        )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
