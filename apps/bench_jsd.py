"""The JSD kernels beside their alternatives: `python -m apps.bench_jsd --device cpu --json FILE`.

Times, peak memory and the share of the memory-bandwidth floor, of the loss alone and with its gradient: this
project's kernels, the eager formula, torch.compile of it, and Liger's kernels where they are installed. Every
contender is checked against the definition in float64 before it is timed. docs/benchmarks.md explains the
figures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

CPU_SIZES = "512x32000,64x151936"
CUDA_SIZES = ",".join(f"{n}x{v}" for v in (32_000, 128_256, 151_936) for n in (1024, 4096, 16_384))
DTYPES = ("float32", "bfloat16")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 1 if a contender computed something else."""
    parser = _parser()
    options = parser.parse_args(argv)
    # Before torch is imported: the profiler, which counts the memory, logs every start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch
    from rich.console import Console

    if options.device == "cuda" and not torch.cuda.is_available():
        build = (
            "this build of torch has no CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        )
        parser.error(f"--device cuda: {build} (torch {torch.__version__}); use --device cpu")

    from forge_composer.bench.contenders import BETA, contenders
    from forge_composer.bench.jsd import Size, run
    from forge_composer.bench.machine import describe_machine

    cuda = options.device == "cuda"
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype or ("bfloat16" if cuda else "float32"))
    hidden = options.hidden or (1024 if cuda else 256)
    repeats = options.repeats or (20 if cuda else 5)
    shapes = options.sizes or _sizes(CUDA_SIZES if cuda else CPU_SIZES)
    sizes = [Size(n, v, h, dtype) for n, v in shapes for h in (None, hidden)]
    found, missing = contenders(device)
    if options.impls:
        _check_names(parser, options.impls, [contender.name for contender in found], missing)
        found = [contender for contender in found if contender.name in options.impls]
        missing = {name: reason for name, reason in missing.items() if name in options.impls}

    console = Console(width=max(100, Console().width))
    machine = describe_machine(device)
    with Console(stderr=True).status("measuring") as status:
        results, bytes_per_s = run(sizes, found, device, repeats=repeats, report=status.update)
    machine["load_after"] = round(os.getloadavg()[0], 2)
    machine["copy_gb_per_s"] = round(bytes_per_s / 1e9, 2)
    skipped = [{"impl": name, "reason": reason} for name, reason in missing.items()] + results.skipped
    content = {
        "machine": machine,
        "settings": {"beta": BETA, "temperature": 1.0, "repeats": repeats},
        "rows": results.rows,
        "skipped": skipped,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _print(console, content)
    return 1 if results.disagreed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m apps.bench_jsd", description=__doc__, allow_abbrev=False)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True, help="where to measure")
    parser.add_argument(
        "--json", type=Path, required=True, metavar="FILE", help="results, written at the end"
    )
    parser.add_argument(
        "--sizes",
        type=_sizes,
        metavar="NxV,...",
        help=f"tokens x vocabulary; default {CPU_SIZES} on CPU, on CUDA 1024, 4096 and 16384 tokens of "
        "32000, 128256 and 151936",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the inputs; default float32 on CPU, bfloat16 on CUDA"
    )
    parser.add_argument(
        "--hidden", type=_positive, metavar="H", help="hidden size; default 256 on CPU, 1024 on CUDA"
    )
    parser.add_argument("--repeats", type=_positive, metavar="R", help="turns; default 5 on CPU, 20 on CUDA")
    parser.add_argument(
        "--impls", type=lambda text: text.split(","), metavar="NAME,...", help="only these; default all"
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _sizes(text: str) -> list[tuple[int, int]]:
    sizes = []
    for part in text.split(","):
        numbers = part.strip().split("x")
        if len(numbers) != 2:
            raise argparse.ArgumentTypeError(f"{part!r} is not NxV, for example 512x32000")
        sizes.append((_positive(numbers[0]), _positive(numbers[1])))
    return sizes


def _check_names(
    parser: argparse.ArgumentParser, wanted: list[str], found: list[str], missing: dict[str, str]
) -> None:
    for name in wanted:
        if name not in found and name not in missing:
            parser.error(f"--impls: there is no {name!r}; there are {', '.join([*found, *missing])}")


def _print(console: Any, content: dict[str, Any]) -> None:
    machine = content["machine"]
    console.print(
        f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}; "
        f"copies {machine['copy_gb_per_s']} GB/s; load {machine['load']} to {machine['load_after']}; "
        f"best and median of {content['settings']['repeats']}",
        soft_wrap=True,
    )
    for (n, v, h), rows in groupby(content["rows"], key=lambda row: (row["n"], row["v"], row["h"])):
        console.print(_table(n, v, h, list(rows)))
    for skip in content["skipped"]:
        where = f" at N={skip['n']:,} V={skip['v']:,}" if "n" in skip else ""
        console.print(f"not measured: {skip['impl']}{where}: {skip['reason']}", markup=False, soft_wrap=True)


def _table(n: int, v: int, h: int | None, rows: list[dict[str, Any]]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    start = "from logits" if h is None else f"from hidden states and LM heads, H={h:,}"
    title = f"N={n:,} V={v:,} {rows[0]['dtype']}, {start}; floor {rows[0]['floor_ms']:.3g} ms"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("impl", no_wrap=True)
    for head in ("fwd ms", "fwd+bwd ms", "median", "x eager", "of floor", "peak MiB", "of eager"):
        table.add_column(head, justify="right", no_wrap=True)
    eager = next((row for row in rows if row["impl"].endswith("eager")), None)
    for row in rows:
        speed = memory = ""
        if eager is not None:
            speed = f"{eager['fwd_bwd_ms'] / row['fwd_bwd_ms']:.2f}"
            memory = f"{row['peak_extra_bytes'] / eager['peak_extra_bytes']:.1%}"
        table.add_row(
            row["impl"],
            f"{row['fwd_ms']:.3g}",
            f"{row['fwd_bwd_ms']:.3g}",
            f"{row['fwd_bwd_median_ms']:.3g}",
            speed,
            f"{row['fraction_of_floor']:.1%}",
            f"{row['peak_extra_bytes'] / 2**20:.1f}",
            memory,
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
