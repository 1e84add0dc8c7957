"""Traces of a scripted student on micro tasks, for a replay without a model: deterministic by seed.

    python -m forge_composer.replay_report.micro_traces assets/replay/traces.jsonl

The student is bad on purpose. Most of its attempts are wrong bodies of the grammar; now and then it only
reads, only talks, or writes a call that does not parse. It tries again until its tests pass or its turns are
used up.
The answers are those of the environment, computed from the grammar.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_composer.envs import prompts
from forge_composer.envs.micro_tasks import MicroTask, make_task, trusted_report
from forge_composer.traces.formats import chat
from forge_composer.traces.formats.files import write_conversations
from forge_composer.types import Message

MODEL = "scripted/student"
_TASKS = 600
"""Tasks that are chosen from."""
_TALK = "I will look at the examples first."
_BROKEN = '{"body": "return '


@dataclass(slots=True, frozen=True)
class StudentSkill:
    """How the student acts; what remains of 1 are wrong bodies."""

    right: float = 0.05
    """Share of turns that write the right body."""
    reads: float = 0.08
    """Share of turns that read the module again."""
    talks: float = 0.05
    """Share of turns without a call."""
    breaks: float = 0.05
    """Share of turns whose call does not parse."""
    most_turns: int = 10
    """Turns after which an episode is cut off."""


def micro_traces(seed: int, steps: int, skill: StudentSkill | None = None) -> Iterator[dict[str, Any]]:
    """Documents in the chat format with this many steps in all; the last one may be cut short.

    Args:
        seed: fixes everything.
        steps: assistant turns of all traces together.
        skill: of the student.
    """
    skill = skill or StudentSkill()
    rng = random.Random(f"replay/{seed}")
    number = 0
    while steps > 0:
        task = make_task("easy", "train", rng.randrange(_TASKS), hidden_tests=1)
        messages, turns, solved = _episode(task, skill, min(skill.most_turns, steps), rng)
        steps -= turns
        yield {
            "id": f"micro-{number}",
            "model": MODEL,
            "reward": float(solved),
            "messages": messages,
            "tools": prompts.TOOLS,
        }
        number += 1


def _episode(
    task: MicroTask, skill: StudentSkill, most_turns: int, rng: random.Random
) -> tuple[list[Message], int, bool]:
    """Messages, number of assistant turns, and whether it was handed in with all tests passed."""
    messages = prompts.initial_messages(task.module_source)
    passed = False
    for turn in range(most_turns):
        if passed:
            messages += _turn(turn, [(prompts.SUBMIT, "{}", prompts.SUBMITTED)])
            return messages, turn + 1, True
        said, passed = _attempt(turn, task, skill, rng)
        messages += said
    return messages, most_turns, False


def _attempt(
    turn: int, task: MicroTask, skill: StudentSkill, rng: random.Random
) -> tuple[list[Message], bool]:
    """One turn with its answers, and whether all tests passed."""
    kinds = ("right", "reads", "talks", "breaks", "wrong")
    shares = [skill.right, skill.reads, skill.talks, skill.breaks]
    kind = rng.choices(kinds, [*shares, 1.0 - sum(shares)])[0]
    if kind == "reads":
        return _turn(turn, [(prompts.READ, "{}", task.module_source)]), False
    if kind == "talks":
        talk = [Message(role="assistant", content=_TALK), Message(role="user", content=prompts.NO_CALL)]
        return talk, False
    if kind == "breaks":
        problem = prompts.malformed_call("the arguments are no JSON object")
        return _turn(turn, [(prompts.WRITE_BODY, _BROKEN, problem)]), False
    wrong = task.plausible_wrong_bodies(rng, 1)
    body = wrong[0] if wrong and kind == "wrong" else task.reference_body
    report = trusted_report(task, body)
    calls = [
        (prompts.WRITE_BODY, json.dumps({"body": body}), prompts.WRITTEN),
        (prompts.RUN_TESTS, "{}", report),
    ]
    return _turn(turn, calls), report == prompts.ALL_PASSED


def _turn(turn: int, calls: Sequence[tuple[str, str, str]]) -> list[Message]:
    """An assistant message with calls (name, arguments as text, answer), and their answers."""
    names = [f"call_{turn}_{number}" for number in range(len(calls))]
    said = Message(
        role="assistant",
        content="",
        tool_calls=[
            {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
            for identity, (name, arguments, _) in zip(names, calls, strict=True)
        ],
    )
    answers = [
        Message(role="tool", content=answer, tool_call_id=identity)
        for identity, (_, _, answer) in zip(names, calls, strict=True)
    ]
    return [said, *answers]


def write_traces(path: Path, *, seed: int = 0, steps: int = 50) -> int:
    """Write a file of traces; returns how many."""
    return write_conversations(path, map(chat.read_chat, micro_traces(seed, steps)), chat.NAME)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, metavar="FILE", help="JSONL file to write")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="steps of all traces; default 50")
    options = parser.parse_args(argv)
    count = write_traces(options.path, seed=options.seed, steps=options.steps)
    print(f"{options.path}: {count} traces, {options.steps} steps")


if __name__ == "__main__":
    main()
