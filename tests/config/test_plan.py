"""The plan says what would be started, with right numbers, and starts nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from apps._cli import load_or_exit, parse_args
from forge_composer.config import load, read
from forge_composer.config.model_folder import PUBLISHED, read_config, sizes_of
from forge_composer.plan import render_plan, trainer_memory

Write = Callable[..., Path]


def test_parameter_count_is_that_of_transformers(tiny_qwen3_dir: Path) -> None:
    from transformers import Qwen3ForCausalLM

    content = read_config(tiny_qwen3_dir)
    assert content is not None
    model = Qwen3ForCausalLM.from_pretrained(tiny_qwen3_dir)
    assert sizes_of(content).parameters == sum(weight.numel() for weight in model.parameters())
    untied = sizes_of(content | {"tie_word_embeddings": False})
    assert untied.parameters - sizes_of(content).parameters == 259 * 64


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3-0.6B", 0.596),
        ("Qwen3-1.7B", 1.721),
        ("Qwen3-4B", 4.022),
        ("Qwen3-8B", 8.191),
        ("Qwen3-14B", 14.768),
        ("Qwen3-32B", 32.762),
    ],
)
def test_published_sizes_give_the_published_counts(name: str, billions: float) -> None:
    assert PUBLISHED[name].parameters / 1e9 == pytest.approx(billions, abs=5e-4)


def test_trainer_memory_shrinks_with_the_shards(write_config: Write) -> None:
    sizes = PUBLISHED["Qwen3-8B"]
    one = read(write_config(trainer__nproc=1, trainer__parallelism={"dp_shard": 1})).config
    four = read(write_config(trainer__nproc=4, trainer__parallelism={"dp_shard": 4})).config
    assert trainer_memory(one, sizes)["weights (float32)"] == 4 * sizes.parameters
    for kind in ("weights (float32)", "gradients (float32)", "Adam moments (float32)"):
        assert trainer_memory(four, sizes)[kind] == trainer_memory(one, sizes)[kind] / 4
    assert (
        trainer_memory(four, sizes)["activations (rough)"]
        == trainer_memory(one, sizes)["activations (rough)"]
    )


def test_plan_of_eight_gpus_on_a_machine_without(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(checkout)
    with pytest.raises(SystemExit) as ended:
        load_or_exit(parse_args(["--config", "configs/a100x8.toml", "--plan"]))
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert "GPUs         8: trainer GPUs 0-3, generators GPUs 4-7" in text
    assert "dp_replicate 1 x dp_shard 4 x tp 1" in text
    assert "32 groups x 16 = 512 per step" in text
    assert re.search(r"Memory per trainer GPU\n  weights \(float32\) +7\.63 GiB\n", text)
    assert re.search(r"Adam moments \(float32\) +15\.26 GiB\n", text)
    assert re.search(r"weights \(bfloat16\) +15\.26 GiB\n", text)
    assert "[this machine] configs/a100x8.toml: model.path" in text


def test_plan_with_real_problems_exits_with_1(
    write_config: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        load_or_exit(parse_args(["--config", str(write_config()), "--plan", "--trainer.nproc", "3"]))
    assert ended.value.code == 1
    assert "command line: trainer.nproc = 3" in capsys.readouterr().out


def test_plan_of_unknown_sizes_says_so(write_config: Write) -> None:
    config = read(write_config(model__path="/no/where")).config
    text = render_plan(config)
    assert "sizes unknown" in text
    assert "there is no such folder" in text


def test_rows_and_microbatches(write_config: Write) -> None:
    # 16 rollouts of at most 768 tokens; two fit in a row of 1536: 8 rows over 2 ranks, 2 at a time.
    file = write_config(trainer__seq_len=1536, trainer__rows_per_microbatch=2)
    text = render_plan(load(file))
    assert "of 1536 tokens; at most 8 when every rollout is longest (768)" in text
    assert "up to 2 per step on 2 data-parallel ranks, 2 rows each" in text
    assert "Problems\n  none" in text


def test_app_options_and_overrides_are_told_apart() -> None:
    import argparse

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--json", type=Path)
    line = parse_args(
        ["--loop.steps", "3", "--json", "out.json", "--config", "c.toml", "--seed=-1"], parser=parser
    )
    assert line.config_path == Path("c.toml")
    assert line.overrides == ("--loop.steps", "3", "--seed=-1")
    assert line.options.json == Path("out.json")
    assert not line.plan
