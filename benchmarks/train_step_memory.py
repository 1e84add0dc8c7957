"""Peak memory of a training step at a vocabulary of 151,936, with the LM head fused into the losses or not.

    python benchmarks/train_step_memory.py --json benchmarks/results/train_step_memory.json

Each variant in a fresh process, in float32 and bfloat16:
    grpo full    PolicyTrainer.train_step on a small Qwen3, logits made once and kept (logits_memory_mib = 0)
    grpo fused   the same with the logits in chunks (logits_memory_mib = 256, the default)
    sdpo eager   LM heads of student and teacher, the eager JSD over all logits, backward
    sdpo full    the same with this project's kernel, which overwrites the student's logits
    sdpo fused   linear_jsd: loss and gradients from the hidden states, in chunks
docs/benchmarks.md has the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

VARIANTS = ("grpo full", "grpo fused", "sdpo eager", "sdpo full", "sdpo fused")
DTYPES = ("float32", "bfloat16")
PROMPT = 64
SAMPLES = 4
EAGER_UNITS = 14
"""Of [N, V] in the dtype of the logits: what the eager formula takes, with both sets of logits and their
gradient."""


def make_model(folder: Path, vocab: int, hidden: int, layers: int) -> None:
    """Write a random Qwen3 checkpoint with a tied LM head."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def make_batch(options: argparse.Namespace) -> Any:
    """`SAMPLES` samples in as many rows, with `options.tokens` trained tokens together: one micro-batch."""
    from forge_composer.batching.packing import pack_samples
    from forge_composer.types import TrainingSample

    draw = random.Random(0)
    length = PROMPT + options.tokens // SAMPLES
    samples = [
        TrainingSample(
            rollout_id=f"rollout-{number}",
            token_ids=[draw.randrange(options.vocab) for _ in range(length)],
            action_mask=[t >= PROMPT for t in range(length)],
            logprobs=[-12.0 if t >= PROMPT else 0.0 for t in range(length)],
            versions=[0 if t >= PROMPT else -1 for t in range(length)],
            advantages=[draw.uniform(-1.0, 1.0)] * length,
        )
        for number in range(SAMPLES)
    ]
    return pack_samples(samples, seq_len=length, dp_degree=1, rows_per_microbatch=SAMPLES, version=0)


def grpo_step(options: argparse.Namespace, folder: Path, *, fused: bool, dtype: str) -> dict[str, Any]:
    """Memory of the second optimizer step: the optimizer's state exists by then."""
    import torch

    from forge_composer.bench.memory import peak_extra_bytes
    from forge_composer.config.schema import LossConfig, ModelConfig, TrainerConfig
    from forge_composer.training.policy_trainer import PolicyTrainer

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    batch = make_batch(options)
    config = TrainerConfig(
        dtype="float32" if dtype == "float32" else "bfloat16",
        seq_len=PROMPT + options.tokens // SAMPLES,
        rows_per_microbatch=SAMPLES,
        logits_memory_mib=options.budget_mib if fused else 0,
    )
    with tempfile.TemporaryDirectory() as output:
        trainer = PolicyTrainer(
            config,
            ModelConfig(path=folder),
            LossConfig(),
            temperature=1.0,
            max_completion_tokens=options.tokens // SAMPLES,
            total_steps=10,
            seed=0,
            output_dir=Path(output),
            device=options.device,
        )
        losses: list[float] = []

        def step() -> None:
            losses.append(trainer.train_step(batch)["train/loss"])

        step()
        peak = peak_extra_bytes(step, torch.device(options.device))
        parameters = trainer.num_parameters
        trainer.close()
    return {
        "tokens": batch.trained_tokens,
        "parameters": parameters,
        "resident_bytes": 3 * 4 * parameters,  # float32 weights and two moments; gradients count as extra
        "peak_extra_bytes": peak,
        "losses": losses,
    }


def sdpo_step(options: argparse.Namespace, *, form: str, dtype: str) -> dict[str, Any]:
    """Memory of loss and backward from hidden states and LM heads; the gradients of both are part of it."""
    import torch

    from forge_composer.bench.contenders import contenders, linear_full_jsd
    from forge_composer.bench.jsd import Case, Size
    from forge_composer.bench.memory import peak_extra_bytes

    device = torch.device(options.device)
    found, _ = contenders(device)
    by_name = {contender.name: contender.mean_jsd for contender in found}
    loss_of = {
        "eager": by_name["linear_eager"],
        "full": linear_full_jsd,
        "fused": by_name["linear_chunked"],
    }[form]
    case = Case(Size(options.tokens, options.vocab, options.hidden, getattr(torch, dtype)), device)
    values = []

    def step() -> None:
        learned = case.learned()
        loss = loss_of(*learned, *case.fixed)
        loss.backward()
        values.append(float(loss.detach()))

    step()
    peak = peak_extra_bytes(step, device)
    return {"tokens": options.tokens, "peak_extra_bytes": peak, "losses": values}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One variant, in this process."""
    channel, form = options.variant.split()
    if channel == "grpo":
        result = grpo_step(options, options.model, fused=form == "fused", dtype=options.dtype)
    else:
        result = sdpo_step(options, form=form, dtype=options.dtype)
    # ru_maxrss is in KiB on Linux. Includes the interpreter and its libraries.
    peak_rss = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"variant": options.variant, "dtype": options.dtype} | result | {"peak_rss_bytes": peak_rss}


def in_fresh_process(options: argparse.Namespace, variant: str, dtype: str, folder: Path) -> dict[str, Any]:
    """`measure` in a new interpreter; a reason in its place where memory is too small for it."""
    import psutil

    if options.device == "cpu" and variant == "sdpo eager":
        width = 4 if dtype == "float32" else 2
        needed = EAGER_UNITS * width * options.tokens * options.vocab
        if needed > psutil.virtual_memory().available:
            reason = f"needs {needed / 2**30:.1f} GiB of free memory"
            return {"variant": variant, "dtype": dtype, "skipped": reason}
    root = Path(__file__).resolve().parent.parent
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "KINETO_LOG_LEVEL": "99",  # the profiler, which counts the memory, logs every start and stop
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    numbers = ("tokens", "vocab", "hidden", "layers", "budget_mib", "device")
    shared = [text for name in numbers for text in (f"--{name}", str(getattr(options, name)))]
    command = [sys.executable, __file__, *shared]
    command += ["--variant", variant, "--dtype", dtype, "--model", str(folder)]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=900, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    peak = result["peak_extra_bytes"] / 2**20
    print(f"{variant} {dtype}: {peak:,.0f} MiB", file=sys.stderr)
    return result


def main() -> None:
    """Run one variant (`--variant`, used by the script itself) or all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=2048, help=f"a multiple of {SAMPLES}")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--budget_mib", type=int, default=256, help="trainer.logits_memory_mib when fused")
    parser.add_argument("--variant", choices=VARIANTS)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(measure(options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), options.vocab, options.hidden, options.layers)
        rows = [in_fresh_process(options, v, dtype, Path(folder)) for dtype in DTYPES for v in VARIANTS]

    import torch

    from forge_composer.bench.machine import describe_machine

    report = {
        "machine": describe_machine(torch.device(options.device)),
        "settings": {
            name: getattr(options, name) for name in ("tokens", "vocab", "hidden", "layers", "budget_mib")
        },
        "rows": rows,
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
