"""What a run would start, and about how much memory it would take; nothing is started.

The memory figures are estimates: exact for weights, gradients and optimizer state, rough for activations,
without fragmentation and communication buffers.
"""

from __future__ import annotations

from collections.abc import Sequence

from forge_composer.config import Config, Origin, Problem, find_problems, machine
from forge_composer.config.model_folder import PUBLISHED, ModelSizes, read_config, sizes_of

GIB = 2**30
ASSUMED_GPU_GIB = 80
"""GPU memory that the plan assumes, GiB: an A100 or H100 of the larger kind."""
_BYTES = {"float32": 4, "bfloat16": 2}


def render_plan(config: Config, problems: Sequence[Problem] | None = None) -> str:
    """The plan of a run as text.

    Args:
        config: the run.
        problems: what is wrong with it; looked for if None.
    """
    if problems is None:
        problems = find_problems(config, Origin())
    device = machine.resolve_device(config)
    sizes, found = _sizes(config)
    sections = [
        _head(config, device, sizes, found),
        _meshes(config, device),
        _batch(config),
        *_memory(config, device, sizes),
        _problems(problems),
    ]
    return "\n\n".join(sections) + "\n"


def exit_status(problems: Sequence[Problem]) -> int:
    """0 for a plan whose only problems are those of this machine (model folder, GPUs, keys), else 1."""
    return 0 if all(problem.machine_local for problem in problems) else 1


def _sizes(config: Config) -> tuple[ModelSizes | None, str]:
    """The policy's sizes and where they were found; a folder that is not here is known by its name."""
    content = read_config(config.model.path)
    if content is None:
        name = config.model.path.name
        return PUBLISHED.get(name), f"as {name} was published (the folder is not here)"
    try:
        return sizes_of(content), "from config.json"
    except ValueError as error:
        return None, str(error)


def _table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _head(config: Config, device: str, sizes: ModelSizes | None, found: str) -> str:
    if sizes is None:
        model = "sizes unknown: no config.json with sizes there"
    else:
        many = sizes.parameters >= 1e8
        count = f"{sizes.parameters / 1e9:.2f} B" if many else f"{sizes.parameters:,}"
        model = (
            f"{count} parameters, {sizes.layers} layers, hidden {sizes.hidden}, "
            f"{sizes.heads}/{sizes.kv_heads} heads, vocabulary {sizes.vocab}, {found}"
        )
    rows = [
        ("policy", str(config.model.path)),
        ("", model),
        ("launcher", config.runtime.launcher),
        ("device", device if config.runtime.device != "auto" else f"{device} (found on this machine)"),
        ("output", str(config.output_dir)),
    ]
    return _table(f"Plan of run {config.name!r}: nothing is started", rows)


def _meshes(config: Config, device: str) -> str:
    runtime, trainer, generator = config.runtime, config.trainer, config.generator
    layout = trainer.parallelism
    engines = generator.replicas * generator.tp
    rows = [
        (
            "trainer",
            f"{_count(runtime.trainer_hosts, 'host')} x {trainer.nproc // runtime.trainer_hosts} = "
            f"{_count(trainer.nproc, 'process', 'processes')}: dp_replicate {layout.dp_replicate} x dp_shard "
            f"{layout.dp_shard} x tp {layout.tp}",
        ),
        (
            "generator",
            f"{_count(runtime.generator_hosts, 'host')}, {_count(generator.replicas, 'replica')} x tp "
            f"{generator.tp} = {_count(engines, 'process', 'processes')}",
        ),
        ("environment", _environment(config)),
        ("buffer", "1 process"),
        ("weights", f"{config.weights.transport}, after each optimizer step"),
    ]
    if device == "cuda":
        rows.append(("GPUs", _gpus(config, engines)))
    return _table("Meshes", rows)


def _environment(config: Config) -> str:
    environment = config.environment
    workers = _count(environment.workers, "worker process", "worker processes")
    server = f"the server at {environment.url}" if environment.url else f"one {environment.name} server each"
    return f"{workers}, up to {_count(environment.sessions_per_worker, 'session')} each, {server}"


def _gpus(config: Config, engines: int) -> str:
    trainer = config.trainer.nproc
    if machine.is_remote(config):
        return f"trainer {trainer}, generators {engines}, on separate hosts: {trainer + engines} in all"
    if config.runtime.colocate:
        shared = f"trainer {_span(0, trainer)} and generators {_span(0, engines)}"
        return f"{max(trainer, engines)}, shared: {shared}"
    return f"{trainer + engines}: trainer {_span(0, trainer)}, generators {_span(trainer, engines)}"


def _span(first: int, count: int) -> str:
    return f"GPU {first}" if count == 1 else f"GPUs {first}-{first + count - 1}"


def _batch(config: Config) -> str:
    rollout, loop, trainer = config.rollout, config.loop, config.trainer
    rollouts = loop.groups_per_step * rollout.group_size
    degree = trainer.parallelism.dp_replicate * trainer.parallelism.dp_shard
    longest = rollout.max_prompt_tokens + rollout.max_completion_tokens
    fit = trainer.seq_len // longest
    rows_most = -(-rollouts // fit) if fit else rollouts
    microbatches = -(-rows_most // (degree * trainer.rows_per_microbatch))
    lag = loop.max_policy_lag
    rows = [
        ("rollouts", f"{loop.groups_per_step} groups x {rollout.group_size} = {rollouts} per step"),
        ("steps", f"{loop.steps}, {rollouts * loop.steps:,} rollouts in all"),
        (
            "rows",
            f"of {trainer.seq_len} tokens; at most {rows_most} when every rollout is longest ({longest})",
        ),
        (
            "micro-batches",
            f"up to {microbatches} per step on {_count(degree, 'data-parallel rank')}, "
            f"{_count(trainer.rows_per_microbatch, 'row')} each",
        ),
        ("policy lag", "0: synchronous, deterministic" if lag == 0 else f"at most {lag} versions"),
        ("evaluation", f"{loop.eval_tasks} held-out tasks" if loop.eval_tasks else "off"),
    ]
    return _table("Batch", rows)


def _memory(config: Config, device: str, sizes: ModelSizes | None) -> list[str]:
    unit = "GPU" if device == "cuda" else "process"
    if sizes is None:
        return [f"Memory per {unit}\n  unknown: the policy's sizes are (see above)"]
    return [
        _table(f"Memory per trainer {unit}", _rows(trainer_memory(config, sizes))),
        _table(f"Memory per generator {unit}", _generator_rows(config, device, sizes)),
    ]


def trainer_memory(config: Config, sizes: ModelSizes) -> dict[str, float]:
    """Bytes on one trainer process, by kind.

    Float32 master weights, gradients and Adam's two moments are sharded over dp_shard x tp. FSDP2 gathers
    one layer and prefetches the next in the compute dtype. Activations: about 34 bytes per token and hidden
    unit in 16 bits without recomputation (Korthikanti et al., arXiv 2205.05198, equation 2, without the
    attention matrix, which fused attention does not keep), a third of it under selective checkpointing,
    the layer inputs and one whole layer under full. Logits: what `trainer.logits_memory_mib` allows, or all
    of a micro-batch with their gradient, in the compute dtype. A KL term, and a
    teacher that is not `live`, hold a second policy.
    """
    trainer = config.trainer
    layout = trainer.parallelism
    shards, width = layout.dp_shard * layout.tp, _BYTES[trainer.dtype]
    tokens = trainer.seq_len * trainer.rows_per_microbatch
    layer = 17.0 * width * tokens * sizes.hidden / layout.tp
    inputs = float(width * tokens * sizes.hidden)
    activations = {
        "none": sizes.layers * layer,
        "selective": sizes.layers * layer / 3,
        "full": sizes.layers * inputs + layer,
    }[trainer.activation_checkpointing]
    logits = 2.0 * width * tokens * sizes.vocab / layout.tp
    if trainer.logits_memory_mib:
        logits = min(logits, trainer.logits_memory_mib * 2.0**20)
    loss = config.loss
    copies = int(loss.grpo.kl_coef > 0) + int(loss.sdpo.weight > 0 and loss.sdpo.teacher != "live")
    frozen = {"reference and teacher (float32)": copies * 4 * sizes.parameters / shards}
    return {
        "weights (float32)": 4 * sizes.parameters / shards,
        "gradients (float32)": 4 * sizes.parameters / shards,
        "Adam moments (float32)": 8 * sizes.parameters / shards,
        f"gathered layers ({trainer.dtype})": 2 * width * sizes.layer_parameters / layout.tp,
        "activations (rough)": activations,
        "logits and their gradient": logits,
        **(frozen if copies else {}),
    }


def _rows(parts: dict[str, float]) -> list[tuple[str, str]]:
    rows = [(name, _gib(value)) for name, value in parts.items()]
    return [*rows, ("total", _gib(sum(parts.values())))]


def _gib(number: float) -> str:
    return f"{number / GIB:8.2f} GiB" if number >= 0.01 * GIB else f"{number / 2**20:8.2f} MiB"


def _generator_rows(config: Config, device: str, sizes: ModelSizes) -> list[tuple[str, str]]:
    generator = config.generator
    dtype = generator.dtype if generator.dtype != "auto" else ("bfloat16" if device == "cuda" else "float32")
    width = _BYTES[dtype]
    weights = width * sizes.parameters / generator.tp
    per_token = sizes.kv_bytes_per_token(width) / generator.tp
    if device == "cuda":
        room = max(0.0, generator.gpu_memory_utilization * ASSUMED_GPU_GIB * GIB - weights)
        label = f"KV cache at {generator.gpu_memory_utilization:g} of an {ASSUMED_GPU_GIB} GiB GPU"
    else:
        room = generator.kv_cache_gib * GIB
        label = "KV cache"
    tokens = int(room // per_token)
    longest = generator.max_num_seqs * generator.max_model_len
    return [
        (f"weights ({dtype})", _gib(weights)),
        (label, f"{_gib(room)}: {tokens:,} tokens at {per_token / 1024:.0f} KiB"),
        (
            "needed if all are longest",
            f"{longest:,} tokens: {generator.max_num_seqs} x {generator.max_model_len}",
        ),
    ]


def _problems(problems: Sequence[Problem]) -> str:
    if not problems:
        return "Problems\n  none"
    lines = ["Problems"]
    for problem in problems:
        where = "  [this machine] " if problem.machine_local else "  "
        lines.append(f"{where}{problem}")
    return "\n".join(lines)
