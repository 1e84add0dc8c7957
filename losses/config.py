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


class SDPOConfig(Section):
    """Self-distillation from the policy with a hint in its context (SDPO, arXiv 2601.20802)."""

    weight: float = Field(0.0, ge=0)
    """alpha: weight of the channel in the total; 0 switches it off."""
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
    per_token_cap: float = Field(0.0, ge=0)
    """Largest divergence of a token, nats; beyond it the token's gradient is 0. 0 switches the cap off."""
    top_k: int = Field(0, ge=0)
    """Distil on the k likeliest tokens only; 0 is the whole vocabulary."""
    top_k_support: Literal["student", "teacher"] = "student"
    """Whose k likeliest tokens: the student's (SDPO) or the teacher's (OPSD)."""
    top_k_tail: bool = True
    """Keep the rest of the probability as one more outcome (SDPO); off renormalises over the k (OPSD)."""


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


class LossConfig(Section):
    """The unified loss."""

    grpo: GRPOConfig = Field(default_factory=GRPOConfig)
    """The verifiable-reward channel."""
    sdpo: SDPOConfig = Field(default_factory=SDPOConfig)
    """The textual-feedback channel."""
