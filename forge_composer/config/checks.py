"""The rules that span several fields, or a field and the machine. All are quick and start nothing."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from pathlib import Path
from urllib.parse import urlsplit

from forge_composer.config import machine, model_folder
from forge_composer.config.errors import Problem
from forge_composer.config.findings import Findings
from forge_composer.config.load import Origin
from forge_composer.config.schema import Config
from forge_composer.config.teachers import doubled_names, too_few_families
from forge_composer.teachers.local.served import local_problems

RUN_FILES = ("config.toml", "metrics.jsonl", "summary.json")
"""A folder that holds one of these is a run."""


def find_problems(config: Config, origin: Origin | None = None) -> list[Problem]:
    """Everything that is wrong with a config whose fields are right one by one."""
    findings = Findings(config, origin or Origin())
    for rule in (_processes, _batch, _lengths, _model, _loop, _weights, _device, _launcher, _gpus):
        rule(findings)
    for rule in (_environment, _teachers, _replay, _output_dir):
        rule(findings)
    return findings.problems


def _processes(found: Findings) -> None:
    trainer, runtime, generator = found.config.trainer, found.config.runtime, found.config.generator
    layout = trainer.parallelism
    ranks = layout.dp_replicate * layout.dp_shard * layout.tp
    names = ("dp_replicate", "dp_shard", "tp")
    if ranks != trainer.nproc:
        found.add(
            "trainer.nproc",
            f"must equal dp_replicate x dp_shard x tp = "
            f"{layout.dp_replicate} x {layout.dp_shard} x {layout.tp} = {ranks}",
            f"set trainer.nproc = {ranks}, or change trainer.parallelism",
            also=tuple(f"trainer.parallelism.{name}" for name in names),
        )
    if trainer.nproc % runtime.trainer_hosts:
        found.add(
            "trainer.nproc",
            f"must be divisible by runtime.trainer_hosts = {runtime.trainer_hosts}: each host runs "
            "equally many",
            "choose a multiple of the number of hosts",
            also=("runtime.trainer_hosts",),
        )
    if generator.replicas % runtime.generator_hosts:
        found.add(
            "generator.replicas",
            f"must be divisible by runtime.generator_hosts = {runtime.generator_hosts}: each host runs "
            "equally many",
            "choose a multiple of the number of hosts",
            also=("runtime.generator_hosts",),
        )


def _batch(found: Findings) -> None:
    config = found.config
    size, groups = config.rollout.group_size, config.loop.groups_per_step
    if size < 2:
        found.add(
            "rollout.group_size",
            "GRPO compares the rollouts of one group: with a single one every advantage is 0",
            "set rollout.group_size to 2 or more (8 is usual)",
        )
    degree = config.trainer.parallelism.dp_replicate * config.trainer.parallelism.dp_shard
    if (groups * size) % degree:
        found.add(
            "loop.groups_per_step",
            f"the global batch of groups_per_step x group_size = {groups} x {size} = {groups * size} "
            f"rollouts is not divisible by the data-parallel degree dp_replicate x dp_shard = {degree}",
            "change loop.groups_per_step or rollout.group_size",
            also=("rollout.group_size", "trainer.parallelism.dp_shard", "trainer.parallelism.dp_replicate"),
        )


def _lengths(found: Findings) -> None:
    config = found.config
    prompt, completion = config.rollout.max_prompt_tokens, config.rollout.max_completion_tokens
    needed = prompt + completion
    both = ("rollout.max_prompt_tokens", "rollout.max_completion_tokens")
    total = f"max_prompt_tokens + max_completion_tokens = {prompt} + {completion} = {needed} tokens"
    for name, have in (
        ("generator.max_model_len", config.generator.max_model_len),
        ("trainer.seq_len", config.trainer.seq_len),
    ):
        if have < needed:
            found.add(
                name,
                f"shorter than {total}, before any observation",
                f"set {name} to {needed} or more, or shorten the rollout",
                also=both,
            )
    turn = config.generator.sampling.max_turn_tokens
    if turn > completion:
        found.add(
            "generator.sampling.max_turn_tokens",
            f"one turn may not sample more than an episode: rollout.max_completion_tokens = {completion}",
            f"set it to {completion} or less",
            also=("rollout.max_completion_tokens",),
        )


def _model(found: Findings) -> None:
    path = found.config.model.path
    if not path.is_dir():
        found.add(
            "model.path",
            "there is no such folder",
            "name a Hugging Face checkpoint folder, or download one there "
            "(`hf download NAME --local-dir PATH`)",
            machine_local=True,
        )
        return
    content = model_folder.read_config(path)
    if content is None:
        found.add(
            "model.path", "the folder has no readable config.json", "name a Hugging Face checkpoint folder"
        )
        return
    if lacks := model_folder.missing_files(path):
        remedy = "complete the download, or export the model and its tokenizer with save_pretrained"
        found.add("model.path", f"the folder lacks {'; '.join(lacks)}", remedy, machine_local=True)
    if content.get("model_type") != "qwen3":
        found.add(
            "model.path",
            f"config.json says model_type {content.get('model_type')!r}; the trainer knows 'qwen3' (dense)",
            "use a model of the Qwen3 dense family",
        )
        return
    try:
        _model_sizes(found, model_folder.sizes_of(content))
    except ValueError as error:
        found.add("model.path", str(error), "use the model's original config.json")


def _model_sizes(found: Findings, sizes: model_folder.ModelSizes) -> None:
    generator, trainer = found.config.generator, found.config.trainer
    if generator.max_model_len > sizes.max_positions:
        found.add(
            "generator.max_model_len",
            f"the model knows max_position_embeddings = {sizes.max_positions} positions",
            f"set it to {sizes.max_positions} or less",
            also=("model.path",),
        )
    for name, degree in (("trainer.parallelism.tp", trainer.parallelism.tp), ("generator.tp", generator.tp)):
        if sizes.heads % degree or sizes.kv_heads % degree:
            found.add(
                name,
                f"must divide the model's {sizes.heads} attention heads and {sizes.kv_heads} key-value heads",
                "choose a common divisor of the two",
                also=("model.path",),
            )


def _loop(found: Findings) -> None:
    config = found.config
    if config.trainer.scheduler.warmup_steps > config.loop.steps:
        found.add(
            "trainer.scheduler.warmup_steps",
            f"longer than the run: loop.steps = {config.loop.steps}",
            "set it to loop.steps or less",
            also=("loop.steps",),
        )
    sessions = config.environment.workers * config.environment.sessions_per_worker
    rollouts = config.loop.groups_per_step * config.rollout.group_size
    if config.loop.max_policy_lag == 0 and sessions < rollouts:
        found.add(
            "environment.sessions_per_worker",
            f"loop.max_policy_lag = 0 runs the {rollouts} rollouts of a step in lockstep, and "
            f"{config.environment.workers} x {config.environment.sessions_per_worker} = {sessions} sessions "
            "cannot hold them",
            f"make environment.workers x sessions_per_worker {rollouts} or more",
            also=("environment.workers", "loop.max_policy_lag"),
        )
    if config.loop.eval_every and not config.loop.eval_tasks:
        found.add(
            "loop.eval_every",
            "loop.eval_tasks = 0 switches evaluation off",
            "set loop.eval_tasks, or loop.eval_every = 0",
            also=("loop.eval_tasks",),
        )


def _weights(found: Findings) -> None:
    config = found.config
    transport = config.weights.transport
    if transport == "shared_memory" and machine.is_remote(config):
        found.add(
            "weights.transport",
            f"trainer and generators of the {config.runtime.launcher} launcher are different hosts, which "
            "share no memory",
            'use "vllm" on GPUs, "message" elsewhere',
            also=("runtime.launcher",),
        )
    if transport == "vllm" and machine.resolve_device(config) == "cpu":
        found.add(
            "weights.transport",
            "vLLM's weight transfer needs CUDA, and the run is on CPU",
            'use "shared_memory" on one host, "message" over several',
            also=("runtime.device",),
            machine_local=config.runtime.device == "auto",
        )


def _device(found: Findings) -> None:
    config = found.config
    device = config.runtime.device
    if machine.is_remote(config):
        if device == "auto":
            found.add(
                "runtime.device",
                "`auto` looks at this machine, but the processes run on others",
                'say "cpu" or "cuda"',
                also=("runtime.launcher",),
            )
    elif device == "cuda" and not machine.visible_gpus():
        found.add(
            "runtime.device",
            "torch can use no CUDA device here (none visible, or a CPU build of torch)",
            'use "cpu" or "auto", or run on a machine with GPUs and the `gpu` extra',
            machine_local=True,
        )
    if config.model.attention in ("flex", "varlen") and machine.resolve_device(config) == "cpu":
        found.add(
            "model.attention",
            "flex and varlen attention need CUDA, and the run is on CPU",
            'use "dense" or "auto"',
            also=("runtime.device",),
            machine_local=device == "auto",
        )


def _launcher(found: Findings) -> None:
    runtime = found.config.runtime
    for name, hosts in (
        ("trainer_hosts", runtime.trainer_hosts),
        ("generator_hosts", runtime.generator_hosts),
    ):
        if runtime.launcher == "local" and hosts > 1:
            found.add(
                f"runtime.{name}",
                "the local launcher has one host",
                'set it to 1, or runtime.launcher to "slurm" or "kubernetes" ("process" imitates hosts here)',
                also=("runtime.launcher",),
            )
    if runtime.launcher == "slurm" and shutil.which("sbatch") is None:
        found.add(
            "runtime.launcher",
            "there is no `sbatch` on this machine",
            "start the run on a node that can submit Slurm jobs",
            machine_local=True,
        )
    if runtime.launcher == "kubernetes" and importlib.util.find_spec("kubernetes") is None:
        found.add(
            "runtime.launcher",
            "the Python package `kubernetes`, which Monarch's KubernetesJob needs, is not installed",
            "pip install 'forge-composer[kubernetes]'",
            machine_local=True,
        )
    image = runtime.kubernetes.image
    if runtime.launcher == "kubernetes" and image is not None and not re.fullmatch(r"\S+", image):
        found.add(
            "runtime.kubernetes.image",
            "this is no container image",
            "give an image reference, or leave it out to attach to pods that exist already",
        )


def _gpus(found: Findings) -> None:
    config = found.config
    if machine.resolve_device(config) != "cuda":
        return
    runtime = config.runtime
    trainer = config.trainer.nproc // runtime.trainer_hosts
    generator = config.generator.replicas * config.generator.tp // runtime.generator_hosts
    if runtime.launcher == "slurm":
        have = runtime.slurm.gpus_per_node
        if have is None:
            found.add(
                "runtime.slurm.gpus_per_node",
                "the run is on GPUs, and none are asked for",
                f"set it to {max(trainer, generator)} or more",
                also=("runtime.device",),
            )
        for name, need in (("trainer.nproc", trainer), ("generator.replicas", generator)):
            if have is not None and need > have:
                found.add(
                    name,
                    f"{need} GPUs on a host, and runtime.slurm.gpus_per_node = {have}",
                    "use more hosts, or fewer processes on each",
                    also=("runtime.slurm.gpus_per_node",),
                )
    elif not machine.is_remote(config) and (have := machine.visible_gpus()):
        trainer, generator = config.trainer.nproc, config.generator.replicas * config.generator.tp
        need = max(trainer, generator) if runtime.colocate else trainer + generator
        if need > have:
            found.add(
                "trainer.nproc",
                f"{trainer} trainer and {generator} generator processes need {need} GPUs; "
                f"this machine has {have}",
                "use fewer processes, or let both share GPUs with runtime.colocate = true",
                also=("generator.replicas", "runtime.colocate"),
                machine_local=True,
            )


def _environment(found: Findings) -> None:
    environment = found.config.environment
    if environment.url is not None:
        parts = urlsplit(environment.url)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
            found.add(
                "environment.url", "this is no base URL of a server", "write it like http://localhost:8000"
            )
        return
    if environment.name == "feature_deletion":
        return
    match = re.fullmatch(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)", environment.name)
    if match is None:
        found.add(
            "environment.name",
            "this is neither `feature_deletion` nor of the form package.module:EnvironmentClass",
            "name the environment's class in that form, or set environment.url",
        )
    elif reason := _not_importable(*match.groups()):
        found.add(
            "environment.name",
            reason,
            "install the package that holds it, or correct the name",
            machine_local=True,
        )


def _not_importable(module: str, name: str) -> str | None:
    """Why `module:name` cannot be had, or None. The module itself is not executed."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        return f"the module {module!r} cannot be found: {error}"
    if spec is None:
        return f"there is no module {module!r}"
    if spec.origin and spec.origin.endswith(".py"):
        source = Path(spec.origin).read_text(encoding="utf-8", errors="replace")
        hidden = re.search(r"import \*|__getattr__", source)
        if not hidden and not re.search(rf"\b{name}\b", source):
            return f"the module {module!r} has no {name!r}"
    return None


def _teachers(found: Findings) -> None:
    for field, wrong, remedy in local_problems(found.config.teachers, found.config.local_teachers):
        found.add(field, wrong, remedy)
    for index, teacher in enumerate(found.config.teachers):
        if teacher.api_key_env is not None and not os.environ.get(teacher.api_key_env):
            found.add(
                f"teachers.{index}.api_key_env",
                f"teacher {teacher.name!r} takes its key from this environment variable, which is not set",
                f"export {teacher.api_key_env}, or remove the teacher",
                machine_local=True,
            )


def _replay(found: Findings) -> None:
    """Replay in the loop; the quorum has to be possible."""
    config = found.config
    if config.loss.replay_dpo.weight == 0:
        if config.loss.grpo.weight == 0 and config.loss.sdpo.weight == 0:
            found.add(
                "loss.grpo.weight",
                "every channel has weight 0: there is nothing to train on",
                "set the weight of one channel above 0",
                also=("loss.sdpo.weight", "loss.replay_dpo.weight"),
            )
        return
    if not config.teachers:
        found.add(
            "teachers",
            "loss.replay_dpo.weight is above 0 and there is no teacher to ask",
            "add a table [[teachers]] for each (configs/teachers_openrouter.toml), or set the weight to 0",
            also=("loss.replay_dpo.weight",),
        )
        return
    doubled = doubled_names(config.teachers)
    for index, teacher in enumerate(config.teachers):
        if teacher.name in doubled:
            found.add(
                f"teachers.{index}.name",
                "two teachers have this name",
                "give each its own; the ledger goes by it",
            )
    if problem := too_few_families(config.teachers, config.replay.min_quorum):
        found.add(
            "replay.min_quorum",
            problem,
            "add teachers of other families, or lower replay.quorum and replay.min_quorum",
            also=("teachers",),
        )


def _output_dir(found: Findings) -> None:
    folder = found.config.output_dir
    if folder.exists() and not folder.is_dir():
        found.add("output_dir", "this is a file", "name a folder that is new or empty", machine_local=True)
    elif any((folder / name).exists() for name in RUN_FILES):
        found.add(
            "output_dir",
            "this folder holds a run already",
            "name another one (`{time}` in the name makes it unique), or move the old run away",
            machine_local=True,
        )
