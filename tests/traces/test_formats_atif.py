"""ATIF of any version and any producer: lenient with warnings, strict on demand, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forge_composer.rendering.tool_calls import to_message
from forge_composer.rollout.episode import observation_messages
from forge_composer.traces.atif import TraceFormatError, trajectory_from_rollout, validate
from forge_composer.traces.formats.atif import read_atif
from forge_composer.traces.formats.atif_export import write_atif
from forge_composer.traces.formats.chat import read_chat
from forge_composer.traces.formats.conversation import StepTokens, require_trainable
from forge_composer.traces.formats.files import ConversationReader, conversation_from_rollout
from forge_composer.traces.store import TraceWriter
from forge_composer.types import Message, ParsedAction, ToolCall
from tests.traces import format_samples as samples
from tests.traces.rollout_fixtures import make_rollout

VERSIONS = [f"1.{minor}" for minor in range(9)]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_is_read_without_a_warning_and_written_back(version: str) -> None:
    conversation = read_atif(samples.atif(version), strict=True)
    assert conversation.warnings == []
    assert [(m["role"], m["content"]) for m in conversation.messages[:3]] == [
        ("system", "You fix code."),
        ("user", "List the files."),
        ("assistant", ""),
    ]
    first, second = conversation.steps
    assert first.action == ParsedAction("", (ToolCall("c1", "bash", {"command": "ls"}),), "Let me see.")
    assert first.after == [{"role": "tool", "content": "a.py", "tool_call_id": "c1"}]
    minor = int(version[2:])
    ids = StepTokens([4, 5], [1, 2, 3] if minor >= 4 else None, [-0.5, -0.25])
    assert first.tokens == (ids if minor >= 3 else None)
    events = ["Context was compacted.", "42 tokens freed"] if minor >= 2 else []
    assert [m["content"] for m in second.after if m["role"] == "system"] == events
    assert conversation.tools == ([samples.TOOL] if minor >= 5 else [])
    assert conversation.trace_id == ("t1" if minor >= 7 else "s1")
    assert first.extra["model_name"] == "m-2"
    written = write_atif(conversation)
    assert written["schema_version"] == "ATIF-v1.8"
    assert written["final_metrics"]["total_steps"] == len(written["steps"])
    assert read_atif(json.loads(json.dumps(written)), strict=True) == conversation


def test_a_document_that_changes_only_its_version() -> None:
    document = samples.atif("1.7")
    document["steps"].pop()  # the event, whose two messages become two steps
    document["steps"][1] = {"step_id": 2, "source": "user", "message": "List the files."}
    document["final_metrics"]["total_steps"] = 4
    written = write_atif(read_atif(document))
    assert written == document | {"schema_version": "ATIF-v1.8"}


def mended(change: Any) -> list[str]:
    document = samples.atif("1.7")
    change(document)
    with pytest.raises(TraceFormatError):
        read_atif(document, strict=True)
    conversation = read_atif(document)
    assert len(conversation.steps) == 2
    return conversation.warnings


def step(document: dict[str, Any], number: int = 3) -> Any:
    return document["steps"][number - 1]


DEVIATIONS: list[tuple[Any, list[str]]] = [
    (
        lambda d: step(d)["metrics"]["logprobs"].extend([-0.1] * 7),
        ["steps[2].metrics.logprobs: 9 values for 2 ids; left out"],
    ),
    (
        lambda d: step(d)["metrics"].update(completion_tokens=3),
        ["steps[2].metrics.completion_tokens: 3 tokens, but 2 ids"],
    ),
    (
        lambda d: step(d)["metrics"].update(completion_token_ids=[4, "5"]),
        ["steps[2].metrics.completion_token_ids: not whole numbers; the ids of the step are left out"],
    ),
    (lambda d: step(d).update(step_id=7), ["steps[2].step_id: expected 3, got 7"]),
    (lambda d: step(d).update(timestamp="noon"), ["steps[2].timestamp: 'noon' is not ISO 8601; left out"]),
    (
        lambda d: step(d, 2).update(model_name="m"),
        ["steps[1].model_name: only agents have the field, and the source is user; left out"],
    ),
    (
        lambda d: step(d)["observation"]["results"][0].update(source_call_id="c9"),
        ["steps[2].observation: no call has the id 'c9'"],
    ),
    (
        lambda d: step(d)["tool_calls"][0].update(arguments='{"command": "ls"}'),
        ["steps[2].tool_calls[0].arguments: expected a JSON object"],
    ),
    (lambda d: d["agent"].pop("version"), ["agent.version: the field is missing, or not a string"]),
    (lambda d: d.pop("schema_version"), ["schema_version: the field is missing; read as ATIF 1"]),
    (
        lambda d: step(d)["metrics"].update(prompt_tokens=2),
        ["steps[2].metrics.prompt_tokens: 2 tokens, but 3 ids"],
    ),
    (
        lambda d: step(d).update(message=3),
        ["steps[2].message: expected a string, got a whole number ('3'); left out"],
    ),
]


@pytest.mark.parametrize(("change", "warnings"), DEVIATIONS)
def test_deviations_are_mended_with_a_warning_and_refused_when_strict(
    change: Any, warnings: list[str]
) -> None:
    assert mended(change) == warnings


def test_the_deviation_of_the_formats_own_example() -> None:
    document = samples.atif("1.4")
    step(document)["metrics"] = {"completion_token_ids": list(range(37)), "logprobs": [-0.1] * 44}
    conversation = read_atif(document)
    assert conversation.warnings == ["steps[2].metrics.logprobs: 44 values for 37 ids; left out"]
    assert conversation.steps[0].tokens == StepTokens(list(range(37)), None, None)
    with pytest.raises(TraceFormatError, match="cannot be trained on"):
        require_trainable(conversation)


def test_what_is_mended() -> None:
    document = samples.atif("1.7")
    step(document)["metrics"]["logprobs"].append(-0.1)
    step(document)["tool_calls"][0]["arguments"] = '{"command": "ls"}'
    step(document)["observation"]["results"].append({"content": "and a word"})
    step(document)["observation"]["results"][0].pop("source_call_id")
    conversation = read_atif(document)
    first = conversation.steps[0]
    assert first.tokens == StepTokens([4, 5], [1, 2, 3], None)
    assert first.action.tool_calls == (ToolCall("c1", "bash", {"command": "ls"}),)
    assert first.after[0] == {"role": "tool", "content": "a.py", "tool_call_id": "c1"}
    with pytest.raises(TraceFormatError, match="cannot be trained on"):
        require_trainable(conversation)
    newer = read_atif(samples.atif() | {"schema_version": "ATIF-v1.42"})
    assert newer.warnings == ["schema_version: ATIF-v1.42 is newer than ATIF-v1.8, which this release knows"]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"schema_version": "ATIF-v2.0", "steps": []}, "'ATIF-v2.0' is not ATIF-v1.0 to ATIF-v1.8"),
        ({"schema_version": "1.4", "steps": []}, "'1.4' is not ATIF-v1.0"),
        ({"schema_version": "ATIF-v1.4"}, "steps: the field is missing"),
        ({"schema_version": "ATIF-v1.4", "steps": [3]}, r"steps\[0\]: expected a JSON object"),
        ({"schema_version": "ATIF-v1.4", "steps": [{"source": "robot"}]}, "expected system, user or agent"),
    ],
)
def test_what_cannot_be_mended(document: Any, message: str) -> None:
    with pytest.raises(TraceFormatError, match=message):
        read_atif(document)


def test_copied_and_deterministic_steps_are_context() -> None:
    document = samples.atif("1.7")
    step(document)["is_copied_context"] = True
    step(document, 4).update(llm_call_count=0)
    conversation = read_atif(document)
    assert conversation.steps == []
    assert [m["role"] for m in conversation.start] == [
        *("system", "user", "assistant", "tool", "assistant", "system", "system")
    ]
    assert read_atif(write_atif(conversation), strict=True) == conversation


def test_parts_that_are_no_text_and_trajectories_of_subagents() -> None:
    document = samples.atif("1.7")
    image = {"type": "image", "source": {"media_type": "image/png", "path": "a.png"}}
    step(document, 2)["message"].append(image)
    document["subagent_trajectories"] = [samples.atif("1.7")]
    conversation = read_atif(document)
    assert conversation.start[1]["content"] == "List the files.\n[image]"
    assert conversation.warnings == [
        "steps[1].message[1]: a part of type 'image' is no text; left out",
        "subagent_trajectories: 1 trajectories of sub-agents are not read",
    ]
    assert write_atif(conversation)["subagent_trajectories"] == [samples.atif("1.7")]


def test_what_atif_has_no_field_for_is_kept() -> None:
    broken = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{x"}}
    conversation = read_chat(
        {
            "messages": [
                {"role": "user", "content": "hi", "name": "Ann"},
                {"role": "assistant", "content": "", "tool_calls": [broken]},
                {"role": "tool", "content": "no JSON", "tool_call_id": "c1"},
                {"role": "assistant", "content": "bye"},
            ]
        }
    )
    conversation.reward, conversation.task_id = 0.25, "t"
    conversation.steps[1].context = [Message(role="user", content="a summary")]
    written = write_atif(conversation)
    again = read_atif(written, strict=True)
    assert (again.reward, again.task_id) == (0.25, "t")
    assert again.messages == conversation.messages
    assert [s.action for s in again.steps] == [s.action for s in conversation.steps]
    assert again.state(1) == [Message(role="user", content="a summary")]


def test_rollouts_of_ours_are_conversations(tmp_path: Path) -> None:
    rollouts = [make_rollout(number) for number in range(8)]
    with TraceWriter(tmp_path / "train.jsonl") as writer:
        for rollout in rollouts:
            writer.append(rollout)
    read = list(ConversationReader(tmp_path))
    assert read == [conversation_from_rollout(rollout) for rollout in rollouts]
    for rollout, conversation in zip(rollouts, read, strict=True):
        assert conversation.warnings == []
        assert (conversation.trace_id, conversation.task_id) == (rollout.rollout_id, rollout.task_id)
        assert (conversation.reward, conversation.tools) == (rollout.reward, rollout.tools)
        assert [s.action for s in conversation.steps] == [t.action for t in rollout.turns]
        history = list(rollout.messages)
        for number, turn in enumerate(rollout.turns):
            assert conversation.state(number) == history
            tokens = conversation.steps[number].tokens
            assert tokens == StepTokens(turn.completion_ids, turn.prompt_ids, turn.logprobs)
            history += [to_message(turn.action), *observation_messages(turn)]
        require_trainable(conversation)
        written = write_atif(conversation)
        validate(written)
        assert read_atif(json.loads(json.dumps(written)), strict=True) == conversation


def test_a_rollout_that_failed_before_its_first_message() -> None:
    rollout = make_rollout()
    rollout.messages, rollout.turns, rollout.reward = [], [], None
    conversation = read_atif(trajectory_from_rollout(rollout))
    assert (conversation.messages, conversation.reward, conversation.warnings) == ([], None, [])
