"""vLLM in the generator's process or beside it: throughput, start, processes, memory, responsiveness.

    python benchmarks/bench_engine.py --json benchmarks/results/engine_cpu.json

Compares, on a random Qwen3 of 0.9 million parameters and on CPU, each in a fresh process:
    thread   forge_composer.generation.engine: in-process LLMEngine, stepped in a thread (the default)
    inline   the same engine, stepped on the event loop
    async    vLLM's AsyncLLM: engine core and worker in processes of their own
docs/decisions/0004-in-process-llmengine.md discusses the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

MODES = ("thread", "inline", "async")
CONCURRENT = (16, 64)
TOKENS = 64
ROUNDS = 5
Generate = Callable[[int], Awaitable[int]]


class InlineExecutor(Executor):
    """Runs what it is given at once, in the caller's thread."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run `fn` and return its finished future."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


def make_model(folder: Path) -> None:
    """Write a random Qwen3 checkpoint."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def requests(count: int) -> list[Any]:
    """`count` requests with different prompts of 48 tokens."""
    from forge_composer.types import SamplingRequest

    return [
        SamplingRequest(f"r{i}", tuple((i + 3 * j) % 512 for j in range(48)), TOKENS, seed=i)
        for i in range(count)
    ]


async def own_engine(folder: Path, mode: str) -> tuple[Generate, Callable[[], Awaitable[None]]]:
    """This project's engine."""
    from forge_composer.config.schema import GeneratorConfig, ModelConfig
    from forge_composer.generation.engine import GenerationEngine

    config = GeneratorConfig(max_model_len=1024, kv_cache_gib=1.0)
    engine = GenerationEngine(ModelConfig(path=folder), config, device="cpu", seed=0)
    if mode == "inline":
        engine._thread = InlineExecutor()
    await engine.start()

    async def generate(count: int) -> int:
        completions = await asyncio.gather(*(engine.generate(r) for r in requests(count)))
        return sum(len(c.token_ids) for c in completions)

    return generate, engine.close


async def async_llm(folder: Path) -> tuple[Generate, Callable[[], Awaitable[None]]]:
    """vLLM's AsyncLLM with the same settings; no token ids are lost, and log-probabilities are asked for."""
    from forge_composer.config.schema import GeneratorConfig
    from forge_composer.generation.requests import sampling_request
    from forge_composer.generation.vllm_compat import engine_args

    config = GeneratorConfig(max_model_len=1024, kv_cache_gib=1.0)
    args = engine_args(config, model=str(folder), device="cpu", seed=0)
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_vllm_config(args.create_engine_config(), disable_log_stats=True)
    calls = iter(range(10**9))

    async def one(request: Any) -> int:
        live = sampling_request(request, vocab_size=512, max_model_len=1024)
        tokens = 0
        prompt: Any = {"prompt_token_ids": live.prompt_ids}
        async for output in engine.generate(prompt, live.params, f"r{next(calls)}"):
            tokens += len(output.outputs[0].token_ids)
        return tokens

    async def generate(count: int) -> int:
        return sum(await asyncio.gather(*(one(r) for r in requests(count))))

    async def close() -> None:
        engine.shutdown()

    await generate(4)
    return generate, close


async def longest_pause(stop: asyncio.Event) -> float:
    """Longest time, in seconds, that the event loop kept a 1 ms timer waiting."""
    longest = 0.0
    while not stop.is_set():
        start = time.perf_counter()
        await asyncio.sleep(0.001)
        longest = max(longest, time.perf_counter() - start - 0.001)
    return longest


async def measure(mode: str, folder: Path) -> dict[str, Any]:
    """All figures of one mode, in this process."""
    import psutil

    start = time.perf_counter()
    generate, close = await (async_llm(folder) if mode == "async" else own_engine(folder, mode))
    result: dict[str, Any] = {"mode": mode, "start_s": time.perf_counter() - start}
    for count in CONCURRENT:
        await generate(count)
        rates, pauses = [], []
        for _ in range(ROUNDS):
            stop = asyncio.Event()
            ticker = asyncio.create_task(longest_pause(stop))
            start = time.perf_counter()
            tokens = await generate(count)
            rates.append(tokens / (time.perf_counter() - start))
            stop.set()
            pauses.append(await ticker)
        result[f"tokens_per_s_{count}"] = rates
        result[f"loop_pause_ms_{count}"] = [1e3 * pause for pause in pauses]
    me = psutil.Process()
    family = [me, *me.children(recursive=True)]
    result["processes"] = len(family)
    result["rss_mib"] = [round(p.memory_info().rss / 2**20) for p in family]
    result["pss_mib"] = round(sum(p.memory_full_info().pss for p in family) / 2**20)
    await close()
    return result


def in_fresh_process(mode: str, folder: Path) -> dict[str, Any]:
    """`measure` in a new interpreter."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if mode == "async" else "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    command = [sys.executable, __file__, "--mode", mode, "--model", str(folder)]
    start = time.perf_counter()
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=300, check=True
    )
    print(f"{mode}: {time.perf_counter() - start:.0f} s in all", file=sys.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def pooled(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The runs of one mode as one row: median of all samples and, for throughput, their range."""
    row: dict[str, Any] = {"mode": runs[0]["mode"], "processes": runs[0]["processes"]}
    row["start_s"] = [round(run["start_s"], 1) for run in runs]
    row["rss_mib"] = runs[-1]["rss_mib"]
    row["pss_mib"] = runs[-1]["pss_mib"]
    for count in CONCURRENT:
        rates = [rate for run in runs for rate in run[f"tokens_per_s_{count}"]]
        row[f"tokens_per_s_{count}"] = round(statistics.median(rates))
        row[f"tokens_per_s_{count}_range"] = [round(min(rates)), round(max(rates))]
        pauses = [pause for run in runs for pause in run[f"loop_pause_ms_{count}"]]
        row[f"loop_pause_ms_{count}"] = round(statistics.median(pauses), 1)
    return row


def main() -> None:
    """Run one mode (`--mode`, used by the script itself) or all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cycles", type=int, default=2, help="times through all modes, forth and back")
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    if options.mode:
        print(json.dumps(asyncio.run(measure(options.mode, options.model))))
        return
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        orders = [MODES if cycle % 2 == 0 else MODES[::-1] for cycle in range(options.cycles)]
        runs = [in_fresh_process(mode, Path(folder)) for order in orders for mode in order]
        rows = [pooled([run for run in runs if run["mode"] == mode]) for mode in MODES]
    report = {
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]},
        "concurrent": CONCURRENT,
        "tokens": TOKENS,
        "rounds": ROUNDS * options.cycles,
        "rows": rows,
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
