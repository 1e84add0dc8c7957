"""The OpenEnv environment `feature_deletion`: a module lost a function body, the agent writes it again.

Micro tasks only need this process and the sandbox. One action is one assistant turn, with all its tool
calls; nothing that the policy can write makes `step` raise. The hidden tests never leave this process.
"""

from __future__ import annotations

import re
import threading
import uuid
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from openenv.core.env_server import Action, Environment, Observation, State
from pydantic import BaseModel, ConfigDict, Field

from forge_composer.envs import prompts
from forge_composer.envs.grading import Case, failures, passed_count, report
from forge_composer.envs.micro_grammar import Difficulty, Split
from forge_composer.envs.micro_tasks import MicroTask, make_task, task_count
from forge_composer.envs.sandbox import Sandbox, SandboxError, SandboxLimits
from forge_composer.types import Feedback

MAX_BODY_CHARS = 4000


class FeatureDeletionOptions(BaseModel):
    """Options of the environment (those of the `environment` table that concern tasks and sandbox)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    difficulty: Difficulty = "easy"
    """Size of the grammar that the functions are drawn from."""
    train_tasks: int = Field(4096, ge=1)
    """Number of different training tasks."""
    hidden_tests: int = Field(6, ge=1)
    """Hidden tests of a task."""
    reward: Literal["all", "share"] = "all"
    """1 if every hidden test passes, else 0; or the share that passes."""
    sandbox_cpu_s: float = Field(1.0, gt=0)
    """CPU seconds of one sandboxed run."""
    sandbox_wall_s: float = Field(5.0, gt=0)
    """Wall-clock seconds of one sandboxed run."""
    sandbox_memory_mib: int = Field(256, ge=64)
    """Address space of one sandboxed run, MiB."""


class Call(BaseModel):
    """One tool call. Anything goes: what does not fit is answered in words, as an observation."""

    name: str = ""
    arguments: dict[str, Any] = Field(default_factory=dict)


class FeatureDeletionAction(Action):  # type: ignore[misc]  # openenv ships no types
    """One assistant turn."""

    calls: list[Call] = Field(default_factory=list)
    """Tool calls, carried out in order until one of them ends the episode."""
    error: str | None = None
    """Why the rest of the turn did not parse, if it did not."""
    finish: bool = False
    """No further turn will come: grade after this one."""


class FeatureDeletionObservation(Observation):  # type: ignore[misc]
    """What a turn led to. `reward` stays None until the episode is graded."""

    task_id: str = ""
    messages: list[dict[str, Any]] = Field(default_factory=list)
    """After a reset: the first messages."""
    tools: list[dict[str, Any]] = Field(default_factory=list)
    """After a reset: the tools in JSON-schema form."""
    results: list[str] = Field(default_factory=list)
    """One text per call, in order, and one for what did not parse."""
    feedback: list[dict[str, Any]] = Field(default_factory=list)
    """Remarks with `kind`, `message`, `details`."""
    reward_breakdown: dict[str, float] = Field(default_factory=dict)
    """`passed` and `hidden_tests` (counts) once graded."""
    error: str | None = None
    """The environment itself failed: the episode is void and has no reward."""


class FeatureDeletionState(State):  # type: ignore[misc]
    """Public state of an episode."""

    task_id: str | None = None
    done: bool = False


@dataclass(slots=True)
class _Episode:
    task: MicroTask
    body: str = prompts.DELETED_BODY
    results: list[str] = field(default_factory=list)
    feedback: list[Feedback] = field(default_factory=list)
    submitted: bool = False

    def say(self, text: str) -> None:
        self.results.append(text)

    def complain(self, kind: str, message: str, **details: Any) -> None:
        self.results.append(message)
        self.feedback.append(Feedback(kind, message, details))


class FeatureDeletionEnvironment(
    Environment[FeatureDeletionAction, FeatureDeletionObservation, FeatureDeletionState]  # type: ignore[misc]
):
    """One session. All sessions of a server share its sandbox."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, options: FeatureDeletionOptions | None = None, sandbox: Sandbox | None = None) -> None:
        super().__init__()
        self.options = options or FeatureDeletionOptions()
        self._sandbox = sandbox or shared_sandbox(self.options)
        self._episode: _Episode | None = None
        self._state = FeatureDeletionState()

    # --- OpenEnv's interface -----------------------------------------------------------------------

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        split: str = "train",
        index: int | None = None,
        task_id: str | None = None,
        **_: Any,
    ) -> FeatureDeletionObservation:
        """Start an episode on the task `task_id`, or at `index` of `split`, or on one that `seed` picks.

        Raises:
            ValueError, IndexError: there is no such split or task.
        """
        self._episode = None
        if task_id is not None:
            split, index = self._address(task_id)
        task = self.get_task_object(split, index if index is not None else self._pick(split, seed))
        self._episode = _Episode(task)
        self._state = FeatureDeletionState(episode_id=episode_id or uuid.uuid4().hex, task_id=task.task_id)
        return FeatureDeletionObservation(
            task_id=task.task_id,
            messages=[dict(message) for message in prompts.initial_messages(task.module_source)],
            tools=prompts.TOOLS,
            metadata={"episode_id": self._state.episode_id},
        )

    def step(
        self, action: FeatureDeletionAction, timeout_s: float | None = None, **_: Any
    ) -> FeatureDeletionObservation:
        """Carry out one assistant turn; never raises."""
        episode = self._episode
        if episode is None:
            return self._observe(error="step before reset")
        episode.results, episode.feedback = [], []
        if self._state.done:
            episode.complain("episode_over", prompts.EPISODE_OVER)
            return self._observe()
        self._state.step_count += 1
        try:
            self._take_turn(episode, action)
            if not (episode.submitted or action.finish):
                return self._observe()
            self._state.done = True
            return self._grade(episode)
        except SandboxError as error:
            self._state.done = True
            return self._observe(error=f"sandbox: {error}")
        except Exception as error:  # a fault of ours must void this episode, not score it
            self._state.done = True
            return self._observe(error=f"{type(error).__name__}: {error}")

    @property
    def state(self) -> FeatureDeletionState:
        """Episode id, step count, task id, done."""
        return self._state

    def close(self) -> None:
        """End the session; later steps are refused."""
        self._episode = None

    # --- OpenEnv's task provider -------------------------------------------------------------------

    def list_splits(self) -> list[Any]:
        """`train` and `eval`, which hold different functions."""
        return [{"name": split, "type": split} for split in get_args(Split)]

    def num_tasks(self, split: str) -> int:
        """Number of tasks of a split."""
        if split == "train":
            return min(task_count(self.options.difficulty, "train"), self.options.train_tasks)
        if split == "eval":
            return task_count(self.options.difficulty, "eval")
        raise ValueError(f"split {split!r}: there are {', '.join(get_args(Split))}")

    def list_tasks(self, split: str) -> list[Any]:
        """Ids of a split's tasks."""
        return [
            f"micro-{self.options.difficulty}-{split}-{index:05d}" for index in range(self.num_tasks(split))
        ]

    def get_task(self, split: str, index: int) -> Any:
        """What the agent may know of a task: id and module."""
        task = self.get_task_object(split, index)
        return {"task_id": task.task_id, "module": task.module_source}

    def get_task_object(self, split: str, index: int) -> MicroTask:
        """The task itself, with its hidden tests; not served over the network."""
        count = self.num_tasks(split)
        if not 0 <= index < count:
            raise IndexError(f"task {index} of split {split!r}: there are tasks 0 to {count - 1}")
        known: Split = "train" if split == "train" else "eval"
        return make_task(self.options.difficulty, known, index, self.options.hidden_tests)

    def _address(self, task_id: str) -> tuple[str, int]:
        """Split and index of `micro-easy-train-00017`."""
        match = re.fullmatch(rf"micro-{self.options.difficulty}-(train|eval)-(\d+)", task_id)
        if match is None:
            raise ValueError(f"task {task_id!r}: expected micro-{self.options.difficulty}-SPLIT-INDEX")
        return match[1], int(match[2])

    def _pick(self, split: str, seed: int | None) -> int:
        if seed is None:
            seed = uuid.uuid4().int
        return seed % self.num_tasks(split)

    # --- a turn --------------------------------------------------------------------------------------

    def _take_turn(self, episode: _Episode, action: FeatureDeletionAction) -> None:
        for call in action.calls:
            if episode.submitted:
                episode.complain("episode_over", prompts.EPISODE_OVER)
            else:
                self._call(episode, call)
        if action.error is not None and not episode.submitted:
            episode.complain("malformed_call", prompts.malformed_call(action.error))
        elif not action.calls:
            episode.complain("no_call", prompts.NO_CALL)

    def _call(self, episode: _Episode, call: Call) -> None:
        wanted = {prompts.WRITE_BODY: {"body"}}.get(call.name, set())
        if call.name not in (prompts.READ, prompts.WRITE_BODY, prompts.RUN_TESTS, prompts.SUBMIT):
            episode.complain("unknown_tool", prompts.unknown_tool(call.name), name=call.name)
        elif set(call.arguments) != wanted:
            given = ", ".join(sorted(call.arguments)) or "none"
            problem = f"expected {', '.join(sorted(wanted)) or 'none'}, got {given}"
            episode.complain("bad_arguments", prompts.bad_arguments(call.name, problem), name=call.name)
        elif call.name == prompts.READ:
            episode.say(episode.task.module_with(episode.body))
        elif call.name == prompts.WRITE_BODY:
            self._write_body(episode, call.arguments["body"])
        elif call.name == prompts.RUN_TESTS:
            remarks = self._run(episode, episode.task.visible)
            episode.feedback += remarks
            episode.say(report(remarks))
        else:
            episode.submitted = True
            episode.say(prompts.SUBMITTED)

    def _write_body(self, episode: _Episode, body: Any) -> None:
        problem = None
        if not isinstance(body, str):
            problem = "body must be a string"
        elif not body.strip():
            problem = "body is empty"
        elif len(body) > MAX_BODY_CHARS:
            problem = f"body is longer than {MAX_BODY_CHARS} characters"
        if problem is not None:
            message = prompts.bad_arguments(prompts.WRITE_BODY, problem)
            episode.complain("bad_arguments", message, name=prompts.WRITE_BODY)
            return
        episode.body = body
        syntax = self._sandbox.run(episode.task.module_with(body), episode.task.function, []).syntax
        if syntax is None:
            episode.say(prompts.WRITTEN)
            return
        line = None
        if syntax.line is not None:
            above = episode.task.module_with(prompts.DELETED_BODY).count("\n")
            line = max(1, syntax.line - above)
        episode.complain("syntax_error", prompts.syntax_error(syntax.message, line), line=line)

    def _run(self, episode: _Episode, cases: tuple[Case, ...]) -> list[Feedback]:
        """Run tests whose inputs and expected values may be shown."""
        task = episode.task
        result = self._sandbox.run(
            task.module_with(episode.body), task.function, [case.arguments for case in cases]
        )
        if result.syntax is not None:
            return [Feedback("syntax_error", prompts.syntax_error(result.syntax.message, None))]
        return failures(task.function, cases, result.calls)

    def _grade(self, episode: _Episode) -> FeatureDeletionObservation:
        """Grade the hidden tests; what they are is not told."""
        task = episode.task
        result = self._sandbox.run(
            task.module_with(episode.body), task.function, [case.arguments for case in task.hidden]
        )
        passed = 0 if result.syntax is not None else passed_count(task.hidden, result.calls)
        total = len(task.hidden)
        reward = passed / total if self.options.reward == "share" else float(passed == total)
        breakdown = {"passed": float(passed), "hidden_tests": float(total)}
        return self._observe(reward=reward, reward_breakdown=breakdown)

    def _observe(self, **fields: Any) -> FeatureDeletionObservation:
        episode = self._episode
        if episode is not None:
            fields["task_id"] = episode.task.task_id
            fields["results"] = list(episode.results)
            fields["feedback"] = [
                {"kind": remark.kind, "message": remark.message, "details": remark.details}
                for remark in episode.feedback
            ]
        metadata = {"episode_id": self._state.episode_id}
        return FeatureDeletionObservation(done=self._state.done, metadata=metadata, **fields)


_sandboxes: dict[SandboxLimits, Sandbox] = {}
_sandboxes_lock = threading.Lock()


def shared_sandbox(options: FeatureDeletionOptions) -> Sandbox:
    """This process's sandbox for the given limits, verified when it is first made.

    Raises:
        SandboxUnavailableError: the machine cannot confine foreign code.
    """
    limits = SandboxLimits(options.sandbox_cpu_s, options.sandbox_wall_s, options.sandbox_memory_mib)
    with _sandboxes_lock:
        if limits not in _sandboxes:
            sandbox = Sandbox(limits)
            try:
                sandbox.verify()
            except BaseException:
                sandbox.close()
                raise
            _sandboxes[limits] = sandbox
        return _sandboxes[limits]
