"""Chat, verifiers and SWE-agent documents: read, written, and the same when read again."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from forge_composer.traces.atif import TraceFormatError
from forge_composer.traces.formats.chat import read_chat, write_chat
from forge_composer.traces.formats.conversation import (
    Conversation,
    StepTokens,
    require_trainable,
    training_problems,
)
from forge_composer.traces.formats.files import (
    FORMATS,
    BadLine,
    ConversationReader,
    detect,
    write_conversations,
)
from forge_composer.traces.formats.swe_agent import read_swe_agent, write_swe_agent
from forge_composer.traces.formats.verifiers import read_verifiers, write_verifiers
from forge_composer.types import ParsedAction, ToolCall
from tests.traces import format_samples as samples

SAMPLES = {
    "chat": samples.chat,
    "verifiers": samples.verifiers,
    "swe_agent": samples.swe_query,
    "swe_agent history": samples.swe_history,
    "swe_agent mini": samples.mini,
    "atif": samples.atif,
}


def texts(messages: Any) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


@pytest.mark.parametrize("name", SAMPLES)
def test_each_sample_is_recognised_and_survives_a_round_trip(name: str) -> None:
    document = SAMPLES[name]()
    before = copy.deepcopy(document)
    form = FORMATS[detect(document)]
    assert form.name == name.split()[0]
    conversation = form.read(document)
    assert document == before
    assert conversation.warnings == []
    written = form.write(conversation)
    assert detect(written) == form.name
    assert form.read(json.loads(json.dumps(written))) == conversation


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("name", SAMPLES)
def test_messages_survive_in_every_other_format(name: str, target: str) -> None:
    document = SAMPLES[name]()
    conversation = FORMATS[detect(document)].read(document)
    again = FORMATS[target].read(FORMATS[target].write(conversation))
    assert again.format == target
    assert texts(again.messages) == texts(conversation.messages)
    assert [step.action for step in again.steps] == [step.action for step in conversation.steps]
    assert [step.after for step in again.steps] == [step.after for step in conversation.steps]
    if target != "swe_agent":
        assert again.tools == conversation.tools
    if target in ("atif", "verifiers"):
        assert [step.tokens for step in again.steps] == [step.tokens for step in conversation.steps]
        assert again.reward == conversation.reward
    if target != "chat":
        states = [conversation.state(number) for number in range(len(conversation.steps))]
        assert [again.state(number) for number in range(len(again.steps))] == states


def test_a_chat_line_in_full() -> None:
    conversation = read_chat(samples.chat())
    assert texts(conversation.start) == [
        ("system", "You fix code."),
        ("user", "Say hello first."),
        ("assistant", "Hello."),
        ("user", "List the files. ü ✓"),
    ]
    first, second = conversation.steps
    assert first.action == ParsedAction(
        "", (ToolCall("c1", "bash", {"command": "ls"}), ToolCall("c2", "bash", {"command": "pwd"}))
    )
    assert second.action == ParsedAction("There is a.py.", reasoning="One file.")
    assert texts(first.after) == [("tool", "a.py"), ("tool", "/src")]
    assert conversation.tools == [samples.TOOL]
    assert conversation.state(0) == conversation.start
    assert conversation.state(1) == [*conversation.start, first.message, *first.after]
    assert write_chat(conversation) == samples.chat()


def test_chat_shapes_of_other_times() -> None:
    conversation = read_chat(
        {
            "messages": [
                {"role": "developer", "content": "Fix."},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
                },
                {
                    "role": "assistant",
                    "content": None,
                    "function_call": {"name": "f", "arguments": '{"x": 1}'},
                },
                {"role": "function", "name": "f", "content": "2"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": "c", "name": "g", "arguments": {}}],
                },
                {"role": "tool", "content": "3"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "g", "arguments": "{x"}}],
                },
            ],
            "functions": [{"name": "f", "parameters": {}}, {"description": "no name"}],
        }
    )
    assert texts(conversation.start) == [("system", "Fix."), ("user", "one\ntwo")]
    old, flat, broken = conversation.steps
    (call,) = old.action.tool_calls
    assert (call.name, call.arguments) == ("f", {"x": 1})
    assert old.after[0]["tool_call_id"] == call.id
    assert flat.action.tool_calls == (ToolCall("c", "g", {}),)
    assert flat.after == [{"role": "tool", "content": "3", "tool_call_id": "c"}]
    assert broken.action.error == "tool call 1: the arguments are not a JSON object"
    assert broken.message["tool_calls"][0]["function"]["arguments"] == "{x"
    assert conversation.tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert conversation.warnings == ["tools[1]: a tool without a name; left out"]
    assert write_chat(conversation)["messages"][-1]["tool_calls"][0]["function"]["arguments"] == "{x"


def test_what_is_no_text_is_named() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    conversation = read_chat(
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "See"}, image]}]}
    )
    assert conversation.start[0]["content"] == "See\n[image_url]"
    assert conversation.warnings == [
        "messages[0].content[1]: a part of type 'image_url' is no text; left out"
    ]
    stray = {"role": "tool", "content": "x", "tool_call_id": "c9"}
    conversation = read_chat({"messages": [{"role": "assistant", "content": "a"}, stray]})
    assert conversation.warnings == ["messages[1].tool_call_id: no call before it has the id 'c9'"]


def test_a_verifiers_line_in_full() -> None:
    conversation = read_verifiers(samples.verifiers())
    assert texts(conversation.start) == [("system", "You fix code."), ("user", "List the files.")]
    first, second = conversation.steps
    assert first.action.tool_calls == (ToolCall("c1", "bash", {"command": "ls"}),)
    assert first.tokens == StepTokens([4, 5], [1, 2, 3], [-0.5, -0.25])
    assert second.tokens == StepTokens([7], [1, 2, 3, 4, 5, 6], [-1.5])
    assert first.context is None
    assert second.context is None
    assert (conversation.reward, conversation.task_id) == (0.5, "7")
    assert conversation.tools == [samples.TOOL]
    assert conversation.extra["metrics"] == {"correct": 0.5}
    require_trainable(conversation)
    written = write_verifiers(conversation)
    expected = samples.verifiers()
    del expected["trajectory"][0]["reward"]  # null counts as missing
    assert written == expected


def test_verifiers_lines_of_other_kinds() -> None:
    plain = read_verifiers({"prompt": "2 + 2?", "completion": "4", "reward": 1})
    assert (texts(plain.messages), plain.reward) == ([("user", "2 + 2?"), ("assistant", "4")], 1.0)
    assert training_problems(plain) == ["step 0: no token ids are recorded"]
    document = samples.verifiers()
    del document["tool_defs"]
    document["info"] = {"oai_tools": json.dumps([samples.TOOL])}
    assert read_verifiers(document).tools == [samples.TOOL]
    document = samples.verifiers()
    del document["trajectory"][1]
    conversation = read_verifiers(document)
    assert conversation.warnings == ["trajectory: 1 entries for 2 assistant messages; left out"]
    document = samples.verifiers()
    document["trajectory"][0]["tokens"]["completion_logprobs"].append(-0.1)
    document["trajectory"][1]["prompt"] = document["trajectory"][1]["prompt"][1:]
    conversation = read_verifiers(document)
    assert conversation.warnings == [
        "trajectory[0].tokens.completion_logprobs: 3 numbers for 2 ids; left out"
    ]
    assert texts(conversation.state(1)) == [("user", "List the files."), ("assistant", ""), ("tool", "a.py")]
    with pytest.raises(TraceFormatError, match="completion: the field is missing"):
        read_verifiers({"prompt": [], "completion": None})


def test_a_swe_agent_run_with_queries() -> None:
    conversation = read_swe_agent(samples.swe_query())
    assert texts(conversation.start) == [("system", "Fix it."), ("user", "add() subtracts.")]
    assert [step.action.tool_calls[0].arguments["command"] for step in conversation.steps] == [
        "cat a.py",
        "sed",
        "submit",
    ]
    assert [texts(step.after) for step in conversation.steps] == [
        [("tool", "a\nb\nc")],
        [("tool", "edited")],
        [("tool", "handed in")],
    ]
    assert [step.context is None for step in conversation.steps] == [True, True, False]
    assert texts(conversation.state(2))[3] == ("tool", "Old output omitted (3 lines)")
    assert texts(conversation.preceding(2))[3] == ("tool", "a\nb\nc")
    assert conversation.steps[1].extra["execution_time"] == 0.25
    assert conversation.extra["info"]["exit_status"] == "submitted"
    written = write_swe_agent(conversation)
    entry, original = written["trajectory"][2], samples.swe_query()["trajectory"][2]
    assert {key: entry[key] for key in original if key != "query"} == {
        key: value for key, value in original.items() if key != "query"
    }


def test_a_swe_agent_run_without_queries() -> None:
    conversation = read_swe_agent(samples.swe_history())
    assert [role for role, _ in texts(conversation.start)] == ["system", "user", "assistant", "user"]
    assert [step.action.text for step in conversation.steps] == [
        "Look.\n```\nls\n```",
        "Done.\n```\nsubmit\n```",
    ]
    assert [step.extra["action"] for step in conversation.steps] == ["ls\n", "submit\n"]
    written = write_swe_agent(conversation, layout="history")
    assert "query" not in written["trajectory"][0]
    assert read_swe_agent(written) == conversation
    document = samples.swe_history()
    del document["trajectory"][1]
    warned = read_swe_agent(document)
    assert warned.warnings == ["trajectory: 1 entries for 2 turns of the history; left out"]
    del document["history"]
    with pytest.raises(TraceFormatError, match="an entry has no `query`, and there is no `history`"):
        read_swe_agent(document)


def test_mini_swe_agent() -> None:
    document = samples.mini()
    document["messages"].append({"role": "exit", "content": "Submitted"})
    conversation = read_swe_agent(document)
    assert [step.action.text for step in conversation.steps] == [
        "THOUGHT: look.\n\n```bash\nls\n```",
        "```bash\necho DONE\n```",
    ]
    assert write_swe_agent(conversation, layout="messages") == samples.mini()
    with pytest.raises(ValueError, match="there are query, history and messages"):
        write_swe_agent(conversation, layout="new")


def test_strict_before_training() -> None:
    good = read_verifiers(samples.verifiers())
    require_trainable(good)

    def problems(change: Any) -> list[str]:
        conversation = copy.deepcopy(good)
        change(conversation, conversation.steps[0].tokens)
        return training_problems(conversation)

    def no_tokens(conversation: Conversation, _: Any) -> None:
        conversation.steps[0].tokens = None

    cases: list[tuple[Any, str]] = [
        (no_tokens, "step 0: no token ids are recorded"),
        (lambda c, t: setattr(t, "logprobs", None), "step 0: no log-probabilities are recorded"),
        (lambda c, t: t.logprobs.pop(), "step 0: 2 completion ids but 1 log-probabilities"),
        (lambda c, t: setattr(t, "prompt_ids", None), "step 0: no prompt ids are recorded"),
        (lambda c, t: t.completion_ids.__setitem__(0, -1), "step 0: a token id is negative"),
        (lambda c, t: t.logprobs.__setitem__(0, 0.5), "step 0: a log-probability is not finite, or above 0"),
        (
            lambda c, t: t.logprobs.__setitem__(0, float("nan")),
            "step 0: a log-probability is not finite, or above 0",
        ),
        (lambda c, t: c.warnings.append("x: odd"), "x: odd"),
        (lambda c, t: c.steps.clear(), "there is no step"),
    ]
    for change, expected in cases:
        assert problems(change) == [expected]
    good.source = "a.jsonl:3"
    good.warnings.append("x: odd")
    with pytest.raises(TraceFormatError, match=r"a\.jsonl:3 cannot be trained on: x: odd"):
        require_trainable(good)


def test_files_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    (folder / "deep").mkdir(parents=True)
    lines = [json.dumps(samples.chat()), "", json.dumps(samples.verifiers()), '{"messages": 3}', '{"torn": ']
    (folder / "a.jsonl").write_text("\n".join(lines))
    (folder / "deep" / "run.traj").write_text(json.dumps(samples.swe_query(), indent=2))
    (folder / "deep" / "list.json").write_text(json.dumps([samples.atif(), samples.atif(), 3]))
    (folder / "lines.json").write_text(f"{json.dumps(samples.mini())}\n{json.dumps(samples.chat())}\n")
    (folder / "broken.json").write_text('{\n  "messages": [\n}')
    (folder / "notes.txt").write_text("no trace")
    reader = ConversationReader(folder)
    found = list(reader)
    assert [(conversation.format, conversation.trace_id) for conversation in found] == [
        ("chat", "a:1"),
        ("verifiers", "a:3"),
        ("atif", "t1"),
        ("atif", "t1#2"),
        ("swe_agent", "run:1"),
        ("swe_agent", "lines:1"),
        ("chat", "lines:2"),
    ]
    assert found[1].source == f"{folder / 'a.jsonl'}:3"
    assert [(problem.path.name, problem.line) for problem in reader.problems] == [
        ("a.jsonl", 4),
        ("a.jsonl", 5),
        ("broken.json", 3),
        ("list.json", 1),
    ]
    assert (
        str(reader.problems[0])
        == f"{folder / 'a.jsonl'}:4: messages: expected a list, got a whole number ('3')"
    )
    assert reader.problems[3].reason == "item 2: not a JSON object"
    with pytest.raises(TraceFormatError, match=r"a\.jsonl:4: messages: expected a list"):
        list(ConversationReader(folder, strict=True))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"[]", "not a JSON object"),
        (b"nonsense", "not JSON: Expecting value at character 0"),
        (b'"\xff"', "not UTF-8 at byte 1"),
        (b"[" * 100_000, "not read: the JSON is nested too deeply"),
        (b"9" * 5000, "not read: Exceeds the limit"),
        (b"{}", "no known format: there is nothing"),
        (b'{"nodes": []}', "a trace graph of verifiers"),
        (b'{"messages": [{"content": "x"}]}', "messages[0].role: the field is missing; expected a string"),
        (b'{"messages": [{"role": "wizard"}]}', "messages[0].role: 'wizard' is none of system"),
        (b'{"messages": []}', "messages: there is none"),
        (b'{"messages": ["x"]}', "messages[0]: expected a JSON object, got a string ('x')"),
        (
            b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}',
            "messages[0].tool_calls[0].name: the field is missing",
        ),
        (b'{"schema_version": "ATIF-v2.0", "steps": []}', "schema_version: 'ATIF-v2.0' is not ATIF-v1.0"),
        (b'{"trajectory": {}}', "trajectory: expected a list, got an object"),
    ],
)
def test_bad_lines_are_reported_with_file_and_line(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\n" + line + b"\n")
    reader = ConversationReader(path)
    assert list(reader) == []
    (problem,) = reader.problems
    assert (problem.path, problem.line) == (path, 2)
    assert problem.reason.startswith(reason)


def test_writing_files(tmp_path: Path) -> None:
    conversation = read_chat(samples.chat())
    conversation.start[1]["content"] = "half \ud800 a pair"
    path = tmp_path / "new" / "out.jsonl"
    assert write_conversations(path, [conversation, conversation], "chat") == 2
    back = list(ConversationReader(path, format="chat"))
    assert [c.start[1]["content"] for c in back] == ["half ? a pair"] * 2
    assert write_conversations(tmp_path / "one.traj", [conversation], "swe_agent") == 1
    assert len(list(ConversationReader(tmp_path / "one.traj"))) == 1
    with pytest.raises(ValueError, match="holds one conversation, not 2"):
        write_conversations(tmp_path / "two.traj", [conversation] * 2, "swe_agent")
    with pytest.raises(ValueError, match="there are atif, chat, verifiers, swe_agent"):
        write_conversations(path, [], "csv")
    with pytest.raises(ValueError, match="there are atif, chat, verifiers, swe_agent"):
        ConversationReader(path, format="csv")
    with pytest.raises(FileNotFoundError):
        ConversationReader(tmp_path / "none")
    assert str(BadLine(path, 3, "odd")) == f"{path}:3: odd"
