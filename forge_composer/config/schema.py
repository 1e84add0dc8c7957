"""The one schema: every option of a run, its type, its default and its meaning.

A config is a TOML file whose tables are the classes below (`[trainer.optimizer]` is
`Config.trainer.optimizer`). `forge_composer.config.load` reads it, applies dotted overrides and
explains what is wrong; `forge_composer.config.checks` holds the rules that span several fields.
The string under each field is its documentation, here and in error messages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from forge_composer._section import Section
from forge_composer.config.hints import HintsConfig
from forge_composer.config.replay import ReplayConfig
from forge_composer.config.teachers import TeacherConfig
from forge_composer.losses.config import GRPOConfig, LossConfig
from forge_composer.teachers.local.settings import TeacherServerConfig


class ModelConfig(Section):
    """The policy."""

    path: Path
    """Hugging Face checkpoint folder (config.json, safetensors, tokenizer, chat template)."""
    attention: Literal["auto", "dense", "flex", "varlen"] = "auto"
    """Trainer attention. `dense` is scaled-dot-product attention, document by document (any device);
    `flex` and `varlen` need CUDA. `auto`: dense on CPU, flex on CUDA."""


class RuntimeConfig(Section):
    """Where the processes live."""

    launcher: Literal["local", "process", "slurm", "kubernetes"] = "local"
    """`local`: this machine. `process`: several Monarch "hosts" as processes of this machine (tests).
    `slurm`, `kubernetes`: Monarch jobs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of trainer and generators; `auto` takes CUDA when there is one."""
    trainer_hosts: PositiveInt = 1
    """Hosts of the trainer mesh; `trainer.nproc` counts the processes over all of them."""
    generator_hosts: PositiveInt = 1
    """Hosts of the generator mesh; `generator.replicas` counts the replicas over all of them."""
    colocate: bool = False
    """CUDA: trainer and generators share GPUs, both counting from GPU 0; otherwise the generators take the
    GPUs after the trainer's."""
    threads: PositiveInt = 1
    """OMP threads of each trainer and generator process (CPU)."""
    start_timeout_s: PositiveFloat = 600.0
    """Longest wait for a mesh to come up."""
    stop_timeout_s: PositiveFloat = 8.0
    """Longest wait for a mesh to stop before it is abandoned to the process-tree cleanup."""
    slurm: SlurmConfig = Field(default_factory=lambda: SlurmConfig())
    """Options of the `slurm` launcher."""
    kubernetes: KubernetesConfig = Field(default_factory=lambda: KubernetesConfig())
    """Options of the `kubernetes` launcher."""


class SlurmConfig(Section):
    """Slurm job options, passed to Monarch's SlurmJob."""

    partition: str | None = None
    """Slurm partition."""
    account: str | None = None
    """Slurm account."""
    qos: str | None = None
    """Slurm quality of service."""
    time_limit: str | None = None
    """Slurm time limit, `HH:MM:SS`."""
    gpus_per_node: PositiveInt | None = None
    """GPUs requested on each node."""
    cpus_per_task: PositiveInt | None = None
    """CPU cores requested on each node."""
    mem: str | None = None
    """Memory requested on each node, Slurm syntax."""
    extra_args: tuple[str, ...] = ()
    """Further sbatch arguments."""


class KubernetesConfig(Section):
    """Kubernetes job options, passed to Monarch's KubernetesJob."""

    namespace: str = "default"
    """Kubernetes namespace."""
    image: str | None = None
    """Container image of the workers; None attaches to pods that exist already."""
    port: PositiveInt = 26600
    """Monarch's port in the pods."""


class ParallelismConfig(Section):
    """How torchtitan lays the policy over the trainer's processes: replicate x shard x tensor."""

    dp_replicate: PositiveInt = 1
    """HSDP: number of replicas of the sharded model."""
    dp_shard: PositiveInt = 1
    """FSDP2: number of shards."""
    tp: PositiveInt = 1
    """Tensor-parallel degree."""


class OptimizerConfig(Section):
    """Optimizer (torchtitan's OptimizersContainer)."""

    name: Literal["AdamW", "Adam"] = "AdamW"
    """Algorithm."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Adam's first-moment decay."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Adam's second-moment decay."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this global norm."""


class SchedulerConfig(Section):
    """Learning-rate schedule (torchtitan's LRSchedulersContainer)."""

    warmup_steps: int = Field(0, ge=0)
    """Linear warm-up, in optimizer steps."""
    decay: Literal["none", "linear", "cosine", "sqrt"] = "none"
    """Shape of the decay over the rest of the run."""
    min_lr_factor: float = Field(0.0, ge=0, le=1)
    """Final learning rate as a share of the peak."""


class TrainerConfig(Section):
    """The policy trainer mesh."""

    nproc: PositiveInt = 1
    """Processes over all trainer hosts; equals dp_replicate x dp_shard x tp."""
    parallelism: ParallelismConfig = Field(default_factory=ParallelismConfig)
    """Layout of the model over the processes."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """Optimizer."""
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    """Learning-rate schedule."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype of FSDP's mixed precision; master weights and reductions are float32."""
    seq_len: PositiveInt = 4096
    """Length of a packed row, tokens. A training sample never spans rows."""
    rows_per_microbatch: PositiveInt = 1
    """Packed rows that one data-parallel rank forwards at a time."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """torchtitan's activation checkpointing."""
    logits_memory_mib: int = Field(256, ge=0)
    """Memory for logits, MiB: the LM head and its losses work on as many tokens at a time as fit in it, and
    make logits again for the gradient. 0 makes the logits of a whole micro-batch once and keeps them."""
    checkpoint_every: int = Field(0, ge=0)
    """Steps between torch distributed checkpoints; 0 writes none."""
    keep_checkpoints: int = Field(2, ge=2)
    """Checkpoints kept on disk."""
    export_hf: bool = True
    """Write the final policy as a Hugging Face folder (`checkpoints/final_hf`)."""
    timeout_s: PositiveFloat = 600.0
    """Longest wait for one training step, publication or export."""


class SamplingConfig(Section):
    """How training rollouts are sampled."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer scores tokens at the same temperature."""
    max_turn_tokens: PositiveInt = 1024
    """Most tokens of one assistant turn."""


class GeneratorConfig(Section):
    """The vLLM replicas."""

    replicas: PositiveInt = 1
    """Engines; one actor process each (times `tp`)."""
    tp: PositiveInt = 1
    """Tensor-parallel degree of one engine."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights' dtype in the engine; `auto`: float32 on CPU, bfloat16 on CUDA."""
    max_model_len: PositiveInt = 8192
    """Longest context of the engine, tokens: prompt plus everything sampled and observed."""
    max_num_seqs: PositiveInt = 64
    """Most sequences that an engine decodes at once."""
    kv_cache_gib: PositiveFloat = 1.0
    """KV cache of one engine on CPU, GiB."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Share of the GPU that one engine may use (CUDA)."""
    enforce_eager: bool = True
    """No graph capture and no compilation in the engine."""
    prefix_caching: bool = True
    """Reuse KV blocks of equal prefixes within one policy version (the cache is salted by version)."""
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """Sampling parameters of training rollouts."""
    timeout_s: PositiveFloat = 300.0
    """Longest wait for one completion."""


class WeightsConfig(Section):
    """How a policy version travels from the trainer to the generators."""

    transport: Literal["shared_memory", "message", "vllm"] = "shared_memory"
    """`shared_memory`: one safetensors file in /dev/shm, mapped by all (one host). `message`: tensors in
    Monarch messages (any hosts, slow). `vllm`: vLLM's own weight-transfer API (CUDA)."""
    verify_tolerance: PositiveFloat = 1e-3
    """After each update the generators score a probe of sampled tokens; a larger difference from the
    trainer's log-probabilities (max, nats) is a warning at bfloat16 and stops the run at float32."""
    verify_sequences: int = Field(4, ge=0)
    """Sequences in the probe; 0 switches the check off."""


class EnvironmentConfig(Section):
    """The OpenEnv environments."""

    name: str = "feature_deletion"
    """`feature_deletion` (ours), or an importable `package.module:EnvironmentClass` of any OpenEnv
    package, which a server started by the run will host."""
    url: str | None = None
    """Base URL of a running OpenEnv server; nothing is started then."""
    workers: PositiveInt = 1
    """Environment worker processes; each starts its own server, unless `url` is set."""
    sessions_per_worker: PositiveInt = 64
    """OpenEnv sessions that one worker keeps open at most."""
    step_timeout_s: PositiveFloat = 60.0
    """Longest wait for one environment step; the episode is void after it."""
    difficulty: Literal["easy", "medium", "hard"] = "easy"
    """Micro tasks: size of the grammar that the functions are drawn from."""
    train_tasks: PositiveInt = 4096
    """Micro tasks: number of different training tasks (seeds)."""
    hidden_tests: PositiveInt = 6
    """Micro tasks: hidden tests of a task."""
    reward: Literal["all", "share"] = "all"
    """`all`: 1 if every hidden test passes, else 0. `share`: share of the hidden tests that pass."""
    sandbox_cpu_s: PositiveFloat = 1.0
    """CPU seconds of one sandboxed run."""
    sandbox_wall_s: PositiveFloat = 5.0
    """Wall-clock seconds of one sandboxed run."""
    sandbox_memory_mib: PositiveInt = 256
    """Address space of one sandboxed run, MiB."""


class RolloutConfig(Section):
    """Episodes and groups."""

    group_size: PositiveInt = 8
    """Rollouts of one task that are compared with each other."""
    max_turns: PositiveInt = 4
    """Most assistant turns of an episode."""
    max_prompt_tokens: PositiveInt = 2048
    """Longest first prompt; a longer task is refused and counted."""
    max_completion_tokens: PositiveInt = 1024
    """Most tokens that the policy may sample in one episode, over all turns. Also Dr. GRPO's constant."""
    truncated: Literal["keep", "mask", "penalise"] = "keep"
    """Rollouts that ran out of turns or tokens: `keep` their reward (Composer 2 report, section 4.1: not
    masked), `mask` them from the loss (DAPO, arXiv 2503.14476, section 3.4), or subtract
    `truncation_penalty` from the reward."""
    truncation_penalty: float = Field(0.5, ge=0)
    """Subtracted from the reward of a truncated rollout under `penalise`."""
    retries: int = Field(1, ge=0)
    """Times that a void rollout (environment or generator failure) is run again."""
    timeout_s: PositiveFloat = 900.0
    """Longest duration of one rollout."""


class LoopConfig(Section):
    """The asynchronous loop."""

    steps: PositiveInt = 100
    """Optimizer steps."""
    groups_per_step: PositiveInt = 8
    """Groups in the global batch of one step."""
    max_policy_lag: int = Field(2, ge=0)
    """Largest lag of a trained token, in policy versions; 0 is synchronous and deterministic."""
    zero_variance: Literal["drop", "resample"] = "drop"
    """Groups whose rewards are all equal teach nothing. `drop`: they count towards `groups_per_step` and
    leave the batch smaller; `resample`: others take their place (DAPO's dynamic sampling)."""
    max_untrainable_batches: PositiveInt = 10
    """Batches in a row (or as many groups) with nothing to train on before the run stops and says why."""
    eval_every: int = Field(0, ge=0)
    """Steps between evaluations on held-out tasks; 0 evaluates at start and end only."""
    eval_tasks: int = Field(128, ge=0)
    """Held-out tasks of an evaluation, one sampled episode each; 0 switches evaluation off."""
    eval_temperature: PositiveFloat = 1.0
    """Sampling temperature of evaluation."""


class MetricsConfig(Section):
    """Where metrics go."""

    tensorboard: bool = True
    """Write TensorBoard events next to `metrics.jsonl`."""
    display: Literal["auto", "live", "plain", "off"] = "auto"
    """Terminal view; `auto` is `live` on a terminal and `plain` lines elsewhere."""


class Config(Section):
    """A run."""

    name: str = "run"
    """Name of the run."""
    # A string: defaults are validated as the file's values are, and there paths are strings.
    output_dir: Path = Field("runs/{name}-{time}")  # type: ignore[assignment]
    """Run folder; must not hold a run already. `{name}` and `{time}` are filled in when a file is loaded."""
    seed: int = Field(0, ge=0)
    """Fixes task order, sampling and initialisation."""
    model: ModelConfig
    """The policy."""
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
    """Processes and hosts."""
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    """Policy trainer."""
    generator: GeneratorConfig = Field(default_factory=GeneratorConfig)
    """vLLM generators."""
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    """Weight transport."""
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig)
    """Environments."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """Episodes and groups."""
    loss: LossConfig = Field(default_factory=LossConfig)
    """Losses."""
    hints: HintsConfig = Field(default_factory=HintsConfig)
    """Targeted textual feedback."""
    teachers: tuple[TeacherConfig, ...] = ()
    """Teachers for trace replay (array of tables); each one's key must be in the environment."""
    local_teachers: TeacherServerConfig | None = None
    """Scripted teachers of the micro tasks that the run serves itself; a teacher with
    `base_url = "http://local/v1"` is one of them. None: none are."""
    replay: ReplayConfig = Field(default_factory=ReplayConfig)
    """Trace replay to the teachers."""
    loop: LoopConfig = Field(default_factory=LoopConfig)
    """The loop."""
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    """Metrics."""


RuntimeConfig.model_rebuild()
Config.model_rebuild()

__all__ = [
    "Config",
    "EnvironmentConfig",
    "GRPOConfig",
    "GeneratorConfig",
    "HintsConfig",
    "KubernetesConfig",
    "LoopConfig",
    "LossConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelismConfig",
    "ReplayConfig",
    "RolloutConfig",
    "RuntimeConfig",
    "SamplingConfig",
    "SchedulerConfig",
    "SlurmConfig",
    "TeacherConfig",
    "TrainerConfig",
    "WeightsConfig",
]
