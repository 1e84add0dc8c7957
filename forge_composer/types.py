"""The records that travel between the parts of a run.

Everything here is plain data: picklable, free of torch, Monarch and vLLM, so that a rollout can cross
a process boundary, be written to a trace and be read back in a notebook.

Tokens are the truth. A `Turn` keeps the ids that the generator was given and the ids that it sampled;
no later stage decodes and re-tokenises them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

if TYPE_CHECKING:
    from forge_composer.hints.records import DistillTarget

FinishReason = Literal["stop", "length", "abort"]


class Message(TypedDict):
    """One chat message in the OpenAI shape, as chat templates and teacher APIs take it."""

    role: str
    content: str
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


@dataclass(slots=True, frozen=True)
class ToolCall:
    """A call that the policy wrote and that parsed: `arguments` is the decoded JSON object."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(slots=True, frozen=True)
class ParsedAction:
    """What one sampled assistant turn says, read back from its text.

    `error` is set, in words, when the text holds a tool call that does not parse; the calls before it
    are kept. An action without any call and without an error is plain text.
    """

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    error: str | None = None


@dataclass(slots=True, frozen=True)
class SamplingRequest:
    """One completion to sample: token ids in."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class Completion:
    """One sampled completion: token ids out, the stop token included when it was sampled.

    `logprobs[i]` is the log-probability (nats) of `token_ids[i]` under the sampling distribution, that
    is at the request's temperature; `versions[i]` is the policy version whose weights sampled it.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    seconds: float = 0.0


@dataclass(slots=True, frozen=True)
class Feedback:
    """One remark of the environment about a turn, structured.

    `kind` is a stable key (`test_failed`, `unknown_tool`, `bad_arguments`, `malformed_call`, ...),
    `message` the sentence shown to the policy, `details` what a program may want to know.
    """

    kind: str
    message: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class EpisodeStart:
    """What an environment answers to a reset: the first messages and the tools in JSON-schema form."""

    task_id: str
    messages: list[Message]
    tools: list[dict[str, Any]]
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class EpisodeStep:
    """What an environment answers to one assistant turn.

    `observations` holds one text per tool call, in order (one text, if the turn had no valid call).
    `reward` is None until the episode is graded; an episode that could not be graded stays None and is
    never scored 0. `error` is set when the environment itself failed: the rollout is void.
    """

    observations: list[str]
    reward: float | None
    done: bool
    feedback: list[Feedback] = field(default_factory=list)
    reward_breakdown: dict[str, float] = field(default_factory=dict)
    error: str | None = None


@dataclass(slots=True)
class Turn:
    """One assistant turn: the exact context ids, what was sampled, and what the environment said."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    action: ParsedAction
    observations: list[str] = field(default_factory=list)
    feedback: list[Feedback] = field(default_factory=list)
    generate_s: float = 0.0
    environment_s: float = 0.0
    opens_sample: bool = True
    """True where `prompt_ids` does not extend the previous turn's ids: a new training sample starts."""


class RolloutStatus(enum.StrEnum):
    """How a rollout ended. Only `FAILED` leaves it without a reward."""

    COMPLETED = "completed"
    TRUNCATED_TURNS = "truncated_turns"
    TRUNCATED_LENGTH = "truncated_length"
    FAILED = "failed"


@dataclass(slots=True)
class Rollout:
    """One episode of one policy on one task."""

    rollout_id: str
    group_id: int
    index: int
    task_id: str
    seed: int
    messages: list[Message]
    tools: list[dict[str, Any]]
    turns: list[Turn] = field(default_factory=list)
    status: RolloutStatus = RolloutStatus.FAILED
    reward: float | None = None
    reward_breakdown: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    started_at: float = 0.0
    ended_at: float = 0.0
    split: str = "train"
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def truncated(self) -> bool:
        """True if the rollout ran out of turns or of tokens."""
        return self.status in (RolloutStatus.TRUNCATED_TURNS, RolloutStatus.TRUNCATED_LENGTH)

    @property
    def completion_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(len(turn.completion_ids) for turn in self.turns)

    @property
    def version_min(self) -> int | None:
        """Oldest policy version among the sampled tokens; None if nothing was sampled."""
        return min((v for turn in self.turns for v in turn.versions), default=None)

    @property
    def version_max(self) -> int | None:
        """Newest policy version among the sampled tokens; None if nothing was sampled."""
        return max((v for turn in self.turns for v in turn.versions), default=None)


@dataclass(slots=True)
class RolloutGroup:
    """The rollouts of one task, compared with each other by the group-relative advantage."""

    group_id: int
    task_id: str
    start_version: int
    rollouts: list[Rollout]

    @property
    def rewards(self) -> list[float]:
        """The rewards of the scorable rollouts, in order of their index."""
        return [r.reward for r in self.rollouts if r.reward is not None]

    @property
    def version_min(self) -> int:
        """Oldest policy version that any sampled token of the group has."""
        versions = [v for r in self.rollouts if (v := r.version_min) is not None]
        return min(versions, default=self.start_version)


@dataclass(slots=True)
class TrainingSample:
    """One token sequence to train on. All lists have the sequence's length.

    `action_mask[t]` is True where the policy itself sampled token t and is to be trained on it;
    `logprobs`, `versions` and `advantages` carry values there and 0 (-1 for versions) elsewhere. A token's
    version here is the oldest one that took part in it, that of its turn's first token.
    """

    rollout_id: str
    token_ids: list[int]
    action_mask: list[bool]
    logprobs: list[float]
    versions: list[int]
    advantages: list[float]
    policy_gradient: bool = True
    """False for a sample that is there for its targets only: in no term and no divisor of GRPO."""
    targets: list[DistillTarget] = field(default_factory=list)
    """Turns of it that are distilled."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True, frozen=True)
class ScoreRequest:
    """A whole sequence whose tokens are to be scored (log-probability of each given those before it)."""

    token_ids: tuple[int, ...]
    temperature: float = 1.0
