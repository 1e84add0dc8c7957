"""The options of the losses; each cites its paper. No torch: a config is checked before anything is
loaded."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from forge_composer._section import Section

Aggregation = Literal["constant", "token_mean", "sequence_mean"]
KLEstimator = Literal["k1", "k2", "k3"]


class GRPOConfig(Section):
    """Group-relative policy optimisation."""

    weight: float = Field(1.0, ge=0)
    """Weight of the channel in the total; 0 switches it off, for a run of one of the other channels."""
    advantage_std: bool = False
    """Divide advantages by the group's standard deviation (GRPO, arXiv 2402.03300); off is Dr. GRPO
    (arXiv 2503.20783)."""
    leave_one_out: bool = False
    """Baseline without the rollout itself (RLOO, arXiv 2402.14740)."""
    objective: Literal["clip", "cispo"] = "clip"
    """`clip`: the smaller of the plain and the clipped term (PPO, arXiv 1707.06347). `cispo`: the clipped
    ratio is a constant weight of the log-probability, so that no token loses its gradient (MiniMax-M1, arXiv
    2506.13585)."""
    ratio: Literal["token", "sequence"] = "token"
    """`sequence`: one ratio for all tokens of a sample, the geometric mean of theirs (GSPO, arXiv
    2507.18071)."""
    old_policy: Literal["trainer", "generator"] = "trainer"
    """Denominator of the ratio. `trainer`: the policy as the optimizer step begins; what the generator
    differs by is corrected by the importance weight under `tis_cap`. With one optimizer step a batch that
    ratio is 1, and the clip ranges never act. `generator`: the policy that sampled the token, however old;
    the clip ranges bound the correction, and there is no other weight."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """Lower clip range of the ratio."""
    clip_high: float = Field(0.28, ge=0)
    """Upper clip range of the ratio (clip-higher of DAPO, arXiv 2503.14476)."""
    tis_cap: float = Field(2.0, ge=0)
    """Cap of the truncated importance weight between trainer and generator; 0 switches the weight off."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL divergence from the policy that the run starts with; above 0 the trainer holds a
    frozen copy of it."""
    kl_estimator: KLEstimator = "k1"
    """With d = log pi - log pi_ref of the sampled token: `k1` d (Composer 2 report, arXiv 2603.24477),
    `k2` d^2 / 2, `k3` exp(-d) - 1 + d (GRPO, arXiv 2402.03300)."""
    kl_placement: Literal["reward", "loss"] = "reward"
    """`reward`: subtracted from each token's advantage, which gives k1 the gradient of the divergence.
    `loss`: added to the loss and differentiated; not for k1, whose gradient is then 0 in expectation."""
    aggregation: Aggregation = "constant"
    """`constant`: divide by rollouts x max_completion_tokens (Dr. GRPO); `token_mean`: by the trained
    tokens of the global batch (DAPO); `sequence_mean`: mean over rollouts of their token means (GRPO)."""

    @model_validator(mode="after")
    def _kl_has_a_gradient(self) -> GRPOConfig:
        if self.kl_coef > 0 and self.kl_estimator == "k1" and self.kl_placement == "loss":
            raise ValueError(
                "kl_estimator 'k1' has no gradient on average in the loss; set kl_placement = 'reward', or "
                "kl_estimator = 'k2' or 'k3'"
            )
        return self


class WeightSchedule(Section):
    """How the weight of a channel changes over the run."""

    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the weight rises linearly from 0."""
    decay: Literal["none", "linear", "cosine"] = "none"
    """How it falls at the end of the run."""
    decay_steps: int = Field(0, ge=0)
    """Optimizer steps over which it falls, the last ones of the run."""
    final_share: float = Field(0.0, ge=0, le=1)
    """Share of the weight that is left in the last step."""

    @model_validator(mode="after")
    def _decay_has_steps(self) -> WeightSchedule:
        if (self.decay == "none") != (self.decay_steps == 0):
            raise ValueError("decay and decay_steps belong together: set both or neither")
        return self


class SDPOConfig(Section):
    """Self-distillation from the policy with a hint in its context (SDPO, arXiv 2601.20802)."""

    weight: float = Field(0.0, ge=0)
    """alpha: weight of the channel in the total; 0 switches it off. With `balance` it is the size of the
    channel's gradient relative to that of GRPO."""
    balance: Literal["none", "grad_norm"] = "none"
    """`grad_norm`: alpha is `weight` times the running ratio of GRPO's gradient norm to this channel's, at
    the gain of the policy's last norm, which both share (the idea of GradNorm, arXiv 1711.02257). The
    advantages' scale and the divisors then cancel out."""
    balance_rate: float = Field(0.2, gt=0, le=1)
    """Share of a step's measurement in the running ratio; steps in which either gradient is 0 do not
    count."""
    balance_max: float = Field(100.0, gt=0)
    """Largest ratio."""
    schedule: WeightSchedule = Field(default_factory=WeightSchedule)
    """How the weight changes over the run."""
    teacher: Literal["live", "ema", "trust_region"] = "ema"
    """Who reads the hint: the policy in training, an exponential average of it, or a blend of its logits with
    those of the policy that the run starts with. The last two hold a second copy of the policy."""
    teacher_rate: float = Field(0.05, ge=0, le=1)
    """`ema`: share of the policy that enters the average after each step (0.05 keeps 95% of the teacher).
    `trust_region`: share of the policy in the blend."""
    divergence_beta: float = Field(0.5, ge=0, le=1)
    """0: KL(teacher || student); 1: KL(student || teacher); between: the generalized Jensen-Shannon
    divergence (`alpha` in the SDPO authors' code, `beta` in OPSD, arXiv 2601.18734, and in TRL's GKD)."""
    temperature: float = Field(1.0, gt=0)
    """Divides both sides' logits in the divergence."""
    is_clip: float = Field(2.0, ge=0)
    """Cap of the importance weight pi / pi_generator of a token; 0 switches the weight off."""
    teacher_entropy_coef: float = Field(0.0, ge=0)
    """Weigh each token by exp(-coef H), H the teacher's entropy there in nats: what the teacher is not sure
    of counts less. 1 in SRPO (arXiv 2604.02288); 0 switches it off."""
    per_token_cap: float = Field(0.0, ge=0)
    """Largest divergence of a token, nats; beyond it the token's gradient is 0. 0 switches the cap off."""
    top_k: int = Field(0, ge=0)
    """Distil on the k likeliest tokens only; 0 is the whole vocabulary."""
    top_k_support: Literal["student", "teacher"] = "student"
    """Whose k likeliest tokens: the student's (SDPO) or the teacher's (OPSD)."""
    top_k_tail: bool = True
    """Keep the rest of the probability as one more outcome (SDPO); off renormalises over the k (OPSD)."""
    measure_after_every: int = Field(0, ge=0)
    """Measure the divergence of the distilled tokens again after every so many optimizer steps (the metrics
    `sdpo/jsd_after` and `sdpo/jsd_change`): one more forward pass of both sides. 0: never."""


class ReplayDPOConfig(Section):
    """Step-level preference pairs from teachers (DPO, arXiv 2305.18290; Step-DPO, arXiv 2406.18629)."""

    weight: float = Field(0.0, ge=0)
    """beta: weight of the channel in the total; 0 switches it off."""
    tau: float = Field(0.1, gt=0)
    """Scale of the implicit reward (`beta` in the DPO paper)."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of pairs that are taken to be the wrong way round (conservative DPO)."""
    length_normalise: bool = False
    """Log-probabilities per token instead of summed (SimPO, arXiv 2405.14734, equation 4; DMPO,
    arXiv 2406.14868)."""
    schedule: WeightSchedule = Field(default_factory=WeightSchedule)
    """How the weight changes over the run."""


class LossConfig(Section):
    """The unified loss."""

    grpo: GRPOConfig = Field(default_factory=GRPOConfig)
    """The verifiable-reward channel."""
    sdpo: SDPOConfig = Field(default_factory=SDPOConfig)
    """The textual-feedback channel."""
    replay_dpo: ReplayDPOConfig = Field(default_factory=ReplayDPOConfig)
    """The trace-replay channel."""
