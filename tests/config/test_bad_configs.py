"""Each bad config gives an error that names file, field, value and remedy."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge_composer.config import ConfigError, load, machine

Write = Callable[..., Path]


def _teacher(name: str, **fields: Any) -> dict[str, Any]:
    price = {"input": 1.0, "output": 1.0}
    return {"name": name, "model": "m/1", "base_url": "http://localhost/v1", "price": price} | fields


# changed fields -> field named, value shown, words of the explanation, words of the remedy
FILES: dict[str, tuple[dict[str, Any], str, str, str, str]] = {
    "unknown key": (
        {"trainer__optimizer__learning_rate": 1e-5},
        "trainer.optimizer.learning_rate",
        "1e-05",
        "no such field",
        "did you mean",
    ),
    "misspelt key": (
        {"generator__max_model_length": 1024},
        "generator.max_model_length",
        "1024",
        "no such field",
        "did you mean generator.max_model_len?",
    ),
    "misspelt table": ({"rollouts": {"max_turns": 3}}, "rollouts", "max_turns", "no such field", "rollout"),
    "wrong type": ({"loop__steps": "ten"}, "loop.steps", '"ten"', "valid integer", "Optimizer steps"),
    "number as text": ({"trainer__nproc": "2"}, "trainer.nproc", '"2"', "valid integer", "Processes"),
    "out of range": (
        {"rollout__max_turns": 0},
        "rollout.max_turns",
        "0",
        "greater than 0",
        "assistant turns",
    ),
    "not a choice": (
        {"weights__transport": "pigeon"},
        "weights.transport",
        '"pigeon"',
        "'shared_memory', 'message'",
        "allowed",
    ),
    "required field": ({"model__path": None}, "model.path", "", "required", "--model.path VALUE"),
    "processes": (
        {"trainer__nproc": 3},
        "trainer.nproc",
        "3",
        "dp_shard x tp = 1 x 2 x 1 = 2",
        "set trainer.nproc = 2",
    ),
    "trainer hosts": (
        {"runtime__launcher": "process", "runtime__trainer_hosts": 4},
        "trainer.nproc",
        "2",
        "runtime.trainer_hosts = 4",
        "multiple",
    ),
    "generator hosts": (
        {"runtime__launcher": "process", "runtime__generator_hosts": 2},
        "generator.replicas",
        "1",
        "runtime.generator_hosts = 2",
        "multiple",
    ),
    "local hosts": ({"runtime__trainer_hosts": 2}, "runtime.trainer_hosts", "2", "one host", "set it to 1"),
    "group of one": ({"rollout__group_size": 1}, "rollout.group_size", "1", "advantage is 0", "2 or more"),
    "batch": (
        {"rollout__group_size": 3, "loop__groups_per_step": 1},
        "loop.groups_per_step",
        "1",
        "1 x 3 = 3 rollouts is not divisible",
        "change loop.groups_per_step",
    ),
    "context": (
        {"generator__max_model_len": 600},
        "generator.max_model_len",
        "600",
        "512 + 256 = 768",
        "768 or more",
    ),
    "row": ({"trainer__seq_len": 700}, "trainer.seq_len", "700", "512 + 256 = 768", "768 or more"),
    "turn": (
        {"generator__sampling__max_turn_tokens": 300},
        "generator.sampling.max_turn_tokens",
        "300",
        "max_completion_tokens = 256",
        "256 or less",
    ),
    "model folder": (
        {"model__path": "/no/where"},
        "model.path",
        '"/no/where"',
        "no such folder",
        "hf download",
    ),
    "positions": (
        {"generator__max_model_len": 4096},
        "generator.max_model_len",
        "4096",
        "max_position_embeddings = 2048",
        "2048 or less",
    ),
    "trainer heads": (
        {"trainer__nproc": 4, "trainer__parallelism": {"tp": 4}},
        "trainer.parallelism.tp",
        "4",
        "2 key-value heads",
        "divisor",
    ),
    "generator heads": ({"generator__tp": 3}, "generator.tp", "3", "4 attention heads", "divisor"),
    "teacher key": (
        {
            "teachers": [
                {
                    "name": "t",
                    "model": "m",
                    "base_url": "http://localhost/v1",
                    "api_key_env": "NO_SUCH_KEY_HERE",
                }
            ]
        },
        "teachers.0.api_key_env",
        "NO_SUCH_KEY_HERE",
        "not set",
        "export NO_SUCH_KEY_HERE",
    ),
    "teacher table": (
        {"teachers": [{"name": "t", "model": "m"}]},
        "teachers.0.base_url",
        "",
        "required",
        "Base URL",
    ),
    "no teacher to ask": (
        {"loss__replay_dpo__weight": 0.5},
        "teachers",
        "[]",
        "no teacher to ask",
        "add a table [[teachers]]",
    ),
    "one family": (
        {"loss__replay_dpo__weight": 0.5, "teachers": [_teacher("a"), _teacher("b")]},
        "replay.min_quorum",
        "2",
        "of 1 model families",
        "add teachers of other families",
    ),
    "two teachers of a name": (
        {"loss__replay_dpo__weight": 0.5, "teachers": [_teacher("a"), _teacher("a", model="n/1")]},
        "teachers.0.name",
        '"a"',
        "two teachers have this name",
        "give each its own",
    ),
    "quorums": (
        {"replay__quorum": 2, "replay__min_quorum": 3},
        "replay",
        "",
        "min_quorum = 3 is above quorum = 2",
        "",
    ),
    "scripted teachers that are not served": (
        {"teachers": [_teacher("a", base_url="http://local/v1")]},
        "teachers.0.base_url",
        '"http://local/v1"',
        "no scripted teachers are served",
        "add the table [local_teachers]",
    ),
    "scripted teacher of no name": (
        {"teachers": [_teacher("a", base_url="http://local/v1")], "local_teachers": {}},
        "teachers.0.model",
        '"m/1"',
        "no scripted teacher has this name",
        "there are scripted/strong",
    ),
    "scripted teachers for nobody": (
        {"local_teachers": {"seed": 1}},
        "local_teachers",
        "seed",
        "none is asked",
        "leave the table out",
    ),
    "no channel": (
        {"loss__grpo__weight": 0.0},
        "loss.grpo.weight",
        "0.0",
        "every channel has weight 0",
        "above 0",
    ),
    "transport on CPU": (
        {"weights__transport": "vllm"},
        "weights.transport",
        '"vllm"',
        "CUDA",
        "shared_memory",
    ),
    "shared memory over hosts": (
        {"runtime__launcher": "slurm"},
        "weights.transport",
        '"shared_memory"',
        "share no memory",
        "message",
    ),
    "attention on CPU": ({"model__attention": "varlen"}, "model.attention", '"varlen"', "need CUDA", "dense"),
    "no kubernetes client": (
        {"runtime__launcher": "kubernetes"},
        "runtime.launcher",
        '"kubernetes"',
        "not installed",
        "forge-composer[kubernetes]",
    ),
    "kubernetes image": (
        {"runtime__launcher": "kubernetes", "runtime__kubernetes__image": "my image"},
        "runtime.kubernetes.image",
        '"my image"',
        "no container image",
        "attach to pods",
    ),
    "device of a cluster": (
        {"runtime__launcher": "slurm", "runtime__device": "auto"},
        "runtime.device",
        '"auto"',
        "run on others",
        "cpu",
    ),
    "GPUs of a cluster": (
        {"runtime__launcher": "slurm", "runtime__device": "cuda"},
        "runtime.slurm.gpus_per_node",
        "null",
        "none are asked for",
        "set it to 2",
    ),
    "too many GPUs": (
        {"runtime__launcher": "slurm", "runtime__device": "cuda", "runtime__slurm__gpus_per_node": 1},
        "trainer.nproc",
        "2",
        "gpus_per_node = 1",
        "more hosts",
    ),
    "url": (
        {"environment__url": "localhost:8000"},
        "environment.url",
        '"localhost:8000"',
        "no base URL",
        "http://",
    ),
    "environment": (
        {"environment__name": "chess"},
        "environment.name",
        '"chess"',
        "package.module:EnvironmentClass",
        "url",
    ),
    "environment module": (
        {"environment__name": "no_such_package.envs:Chess"},
        "environment.name",
        "no_such_package",
        "cannot be found",
        "install",
    ),
    "environment class": (
        {"environment__name": "json.decoder:Chess"},
        "environment.name",
        "json.decoder",
        "has no 'Chess'",
        "correct",
    ),
    "warm-up": (
        {"trainer__scheduler__warmup_steps": 11},
        "trainer.scheduler.warmup_steps",
        "11",
        "loop.steps = 10",
        "loop.steps or less",
    ),
    "evaluation": (
        {"loop__eval_every": 5, "loop__eval_tasks": 0},
        "loop.eval_every",
        "5",
        "switches evaluation off",
        "set",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_bad_file(case: str, write_config: Write) -> None:
    changes, field, value, wrong, remedy = FILES[case]
    file = write_config(**changes)
    with pytest.raises(ConfigError) as caught:
        load(file)
    found = [
        problem for problem in caught.value.problems if problem.field == field and wrong in problem.wrong
    ]
    assert len(found) == 1, str(caught.value)
    (problem,) = found
    assert problem.source.removesuffix(" (default)") == str(file)
    assert value in problem.value
    assert remedy in problem.remedy
    for part in (str(file), field, value, wrong, remedy):
        assert part in str(caught.value)


def test_the_config_that_the_cases_spoil_is_right(write_config: Write, model_folder: Path) -> None:
    assert load(write_config()).model.path == model_folder


def test_all_problems_are_told_at_once(write_config: Write) -> None:
    file = write_config(trainer__nproc=3, rollout__group_size=1, model__attention="flex")
    with pytest.raises(ConfigError) as caught:
        load(file, ["--loop.steps", "5", "--trainer.scheduler.warmup_steps=6"])
    fields = {problem.field: problem.source for problem in caught.value.problems}
    assert fields == {
        "trainer.nproc": str(file),
        "rollout.group_size": str(file),
        "model.attention": str(file),
        "trainer.scheduler.warmup_steps": "command line",
    }
    assert str(caught.value).startswith("4 problems in the config:")


def test_a_rule_blames_the_command_line_if_any_of_its_fields_was_set_there(write_config: Write) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write_config(), ["--trainer.parallelism.dp_shard", "4"])
    (problem,) = caught.value.problems
    assert (problem.source, problem.field, problem.value) == ("command line", "trainer.nproc", "2")


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("config.json", "no readable config.json"),
        ("model.safetensors", "weights"),
        ("tokenizer.json", "a tokenizer"),
        ("chat_template.jinja", "a chat template"),
    ],
)
def test_incomplete_model_folder(write_config: Write, model_folder: Path, lost: str, words: str) -> None:
    file = write_config()
    (model_folder / lost).unlink()
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        load(file)
    (problem,) = caught.value.problems
    assert (problem.source, problem.field, problem.value) == (
        str(file),
        "model.path",
        json.dumps(str(model_folder)),
    )


def test_missing_weight_shard_is_named(write_config: Write, model_folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (model_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"lacks the weight file model-00002.safetensors"):
        load(write_config())


def test_other_model_family(write_config: Write, model_folder: Path) -> None:
    content = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps(content | {"model_type": "llama"}))
    with pytest.raises(ConfigError, match="model_type 'llama'"):
        load(write_config())


def test_config_json_without_sizes(write_config: Write, model_folder: Path) -> None:
    (model_folder / "config.json").write_text('{"model_type": "qwen3", "hidden_size": 64}')
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        load(write_config())


@pytest.mark.parametrize("left", ["config.toml", "metrics.jsonl", "summary.json"])
def test_output_dir_with_a_run(write_config: Write, tmp_path: Path, left: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / left).touch()
    with pytest.raises(ConfigError, match="holds a run already") as caught:
        load(write_config())
    assert caught.value.problems[0].machine_local
    assert load(write_config(), ["--output_dir", str(tmp_path / "other")]).output_dir == tmp_path / "other"


def test_output_dir_that_is_a_file(write_config: Write, tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(ConfigError, match="this is a file"):
        load(write_config())


def test_slurm_where_there_is_none(write_config: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="no `sbatch` on this machine"):
        load(write_config(runtime__launcher="slurm", weights__transport="message"))


def test_cuda_without_gpus(write_config: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="no CUDA device here") as caught:
        load(write_config(runtime__device="cuda"))
    assert caught.value.problems[0].machine_local


@pytest.mark.parametrize(("colocate", "gpus", "fits"), [(False, 3, True), (False, 2, False), (True, 2, True)])
def test_gpus_of_this_machine(
    write_config: Write, monkeypatch: pytest.MonkeyPatch, colocate: bool, gpus: int, fits: bool
) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda: gpus)
    file = write_config(runtime__device="cuda", runtime__colocate=colocate)
    if fits:
        assert load(file).runtime.device == "cuda"
        return
    with pytest.raises(
        ConfigError, match=r"2 trainer and 1 generator processes need 3 GPUs; this machine has 2"
    ):
        load(file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[loop]\nsteps = x\n", "not valid TOML"),
        ("[loop\n", "not valid TOML"),
        ("a = 1\na = 2\n", "not valid TOML"),
    ],
)
def test_broken_toml(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "broken.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        load(file)
    assert str(file) in str(caught.value)
    assert "line 1" in str(caught.value) or "line 2" in str(caught.value)


def test_missing_file_names_those_that_exist(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout)
    with pytest.raises(ConfigError, match=r"(?s)configs/cpu2.toml.*No such file.*configs/cpu.toml"):
        load("configs/cpu2.toml")


def test_an_error_comes_fast_and_loads_no_torch(write_config: Write, checkout: Path) -> None:
    code = (
        "import sys\n"
        "from apps._cli import load_or_exit, parse_args\n"
        "try:\n    load_or_exit(parse_args(sys.argv[1:]))\n"
        "finally:\n    print('torch' in sys.modules, 'monarch' in sys.modules, 'vllm' in sys.modules)\n"
    )
    command = [sys.executable, "-c", code, "--config", str(write_config()), "--trainer.nproc", "3"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=60, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5  # processor seconds
    assert done.returncode == 2
    assert done.stdout.split() == ["False", "False", "False"]
    assert "command line: trainer.nproc = 3" in done.stderr
    assert "remedy: set trainer.nproc = 2" in done.stderr
