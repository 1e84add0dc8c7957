"""One small document of each format, made by hand from the public schemas."""

from __future__ import annotations

import json
from typing import Any

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


def call(identity: str, command: str) -> dict[str, Any]:
    arguments = json.dumps({"command": command})
    return {"id": identity, "type": "function", "function": {"name": "bash", "arguments": arguments}}


def chat() -> dict[str, Any]:
    """Fine-tuning line: an example turn of weight 0, two turns, the second with reasoning."""
    return {
        "messages": [
            {"role": "system", "content": "You fix code."},
            {"role": "user", "content": "Say hello first."},
            {"role": "assistant", "content": "Hello.", "weight": 0},
            {"role": "user", "content": "List the files. ü ✓"},
            {"role": "assistant", "content": None, "tool_calls": [call("c1", "ls"), call("c2", "pwd")]},
            {"role": "tool", "content": "a.py", "tool_call_id": "c1"},
            {"role": "tool", "content": "/src", "tool_call_id": "c2"},
            {"role": "assistant", "content": "There is a.py.", "reasoning_content": "One file."},
        ],
        "tools": [TOOL],
        "parallel_tool_calls": True,
    }


def verifiers() -> dict[str, Any]:
    """results.jsonl line with the column `trajectory`."""
    flat = json.dumps({"id": "c1", "name": "bash", "arguments": '{"command": "ls"}'})
    prompt = [{"role": "system", "content": "You fix code."}, {"role": "user", "content": "List the files."}]
    turn = {"role": "assistant", "content": "", "tool_calls": [flat]}
    answer = {"role": "tool", "content": "a.py", "tool_call_id": "c1"}
    last = {"role": "assistant", "content": "There is a.py."}
    return {
        "example_id": 7,
        "prompt": prompt,
        "completion": [turn, answer, last],
        "tool_defs": [TOOL["function"]],
        "answer": "a.py",
        "reward": 0.5,
        "metrics": {"correct": 0.5},
        "is_completed": True,
        "is_truncated": False,
        "stop_condition": "no_tools_called",
        "info": {"split": "train"},
        "timing": {"total_ms": 12.5},
        "trajectory": [
            {
                "prompt": prompt,
                "completion": [turn],
                "tokens": tokens([1, 2, 3], [4, 5], [-0.5, -0.25]),
                "reward": None,
                "trajectory_id": "r1",
            },
            {
                "prompt": [*prompt, turn, answer],
                "completion": [last],
                "tokens": tokens([1, 2, 3, 4, 5, 6], [7], [-1.5]),
                "trajectory_id": "r1",
            },
        ],
    }


def tokens(prompt: list[int], completion: list[int], logprobs: list[float]) -> dict[str, Any]:
    return {
        "prompt_ids": prompt,
        "prompt_mask": [0] * len(prompt),
        "completion_ids": completion,
        "completion_mask": [1] * len(completion),
        "completion_logprobs": logprobs,
    }


def swe_query() -> dict[str, Any]:
    """SWE-agent 1.1 with function calling; the second query shows the first result shortened."""
    system = {"role": "system", "content": "Fix it.", "agent": "main", "message_type": "system_prompt"}
    task = {
        "role": "user",
        "content": [{"type": "text", "text": "add() subtracts."}],
        "agent": "main",
        "message_type": "observation",
    }

    def turn(text: str, identity: str, command: str) -> dict[str, Any]:
        return {
            "role": "assistant",
            "content": text,
            "thought": text,
            "action": command,
            "agent": "main",
            "tool_calls": [call(identity, command)],
            "message_type": "action",
        }

    def result(text: str, identity: str) -> dict[str, Any]:
        kind = {"agent": "main", "message_type": "observation"}
        return {"role": "tool", "content": text, "tool_call_ids": [identity], **kind}

    first, second, third = (
        turn("Look.", "c1", "cat a.py"),
        turn("Mend.", "c2", "sed"),
        turn("Done.", "c3", "submit"),
    )
    long, short = result("a\nb\nc", "c1"), result("Old output omitted (3 lines)", "c1")
    edited, handed = result("edited", "c2"), result("handed in", "c3")

    def entry(query: list[dict[str, Any]], action: dict[str, Any], observation: str) -> dict[str, Any]:
        return {
            "action": action["action"],
            "observation": observation,
            "response": action["content"],
            "thought": action["content"],
            "state": {"working_dir": "/src"},
            "execution_time": 0.25,
            "query": query,
            "extra_info": {},
        }

    return {
        "environment": "swe_main",
        "trajectory": [
            entry([system, task], first, "a\nb\nc"),
            entry([system, task, first, long], second, "edited"),
            entry([system, task, first, short, second, edited], third, "handed in"),
        ],
        "history": [system, task, first, long, second, edited, third, handed],
        "info": {"exit_status": "submitted", "model_stats": {"instance_cost": 0.5}},
    }


def swe_history() -> dict[str, Any]:
    """SWE-agent 0.7: text actions, a demonstration in the history, no queries."""
    return {
        "environment": "swe_main",
        "trajectory": [
            {
                "action": "ls\n",
                "observation": "a.py",
                "response": "Look.\n```\nls\n```",
                "state": '{"open_file": "n/a"}',
                "thought": "Look.\n",
            },
            {
                "action": "submit\n",
                "observation": "",
                "response": "Done.\n```\nsubmit\n```",
                "state": '{"open_file": "n/a"}',
                "thought": "Done.\n",
            },
        ],
        "history": [
            {"role": "system", "content": "Fix it.", "agent": "primary"},
            {"role": "user", "content": "An example:", "agent": "primary", "is_demo": True},
            {"role": "assistant", "content": "```\nexit\n```", "agent": "primary", "is_demo": True},
            {"role": "user", "content": "add() subtracts.", "agent": "primary"},
            {
                "role": "assistant",
                "content": "Look.\n```\nls\n```",
                "thought": "Look.\n",
                "action": "ls\n",
                "agent": "primary",
            },
            {"role": "user", "content": "a.py", "agent": "primary"},
            {
                "role": "assistant",
                "content": "Done.\n```\nsubmit\n```",
                "thought": "Done.\n",
                "action": "submit\n",
                "agent": "primary",
            },
        ],
        "info": {"exit_status": "submitted"},
    }


def mini() -> dict[str, Any]:
    """mini-swe-agent."""
    return {
        "info": {"exit_status": "Submitted", "submission": "diff", "mini_version": "1.14"},
        "messages": [
            {"role": "system", "content": "Fix it."},
            {"role": "user", "content": "add() subtracts."},
            {"role": "assistant", "content": "THOUGHT: look.\n\n```bash\nls\n```"},
            {"role": "user", "content": "<returncode>0</returncode>\na.py"},
            {"role": "assistant", "content": "```bash\necho DONE\n```"},
        ],
        "trajectory_format": "mini-swe-agent-1",
    }


def atif(version: str = "1.7") -> dict[str, Any]:
    """A trajectory whose fields are those that the version has."""
    minor = int(version.split(".")[1])
    agent: dict[str, Any] = {
        "name": "coder",
        "version": "2.0",
        "model_name": "m-1",
        "extra": {"mode": "fast"},
    }
    metrics: dict[str, Any] = {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 1,
        "cost_usd": 0.001,
        "logprobs": [-0.5, -0.25],
    }
    document: dict[str, Any] = {
        "schema_version": f"ATIF-v{version}",
        "session_id": "s1",
        "agent": agent,
        "steps": [
            {"step_id": 1, "source": "system", "message": "You fix code."},
            {
                "step_id": 2,
                "source": "user",
                "message": "List the files.",
                "timestamp": "2025-10-16T14:30:00Z",
            },
            {
                "step_id": 3,
                "timestamp": "2025-10-16T14:30:01Z",
                "source": "agent",
                "model_name": "m-2",
                "reasoning_effort": "low",
                "message": "",
                "reasoning_content": "Let me see.",
                "tool_calls": [
                    {"tool_call_id": "c1", "function_name": "bash", "arguments": {"command": "ls"}}
                ],
                "observation": {"results": [{"source_call_id": "c1", "content": "a.py"}]},
                "metrics": metrics,
            },
            {"step_id": 4, "source": "agent", "message": "There is a.py."},
        ],
        "notes": "by hand",
        "final_metrics": {"total_prompt_tokens": 3, "total_steps": 4},
    }
    steps = document["steps"]
    if minor >= 1:
        document["extra"] = {"job": 1}
    if minor >= 2:
        steps.append(
            {
                "step_id": 5,
                "source": "system",
                "message": "Context was compacted.",
                "observation": {"results": [{"content": "42 tokens freed"}]},
            }
        )
        document["final_metrics"]["total_steps"] = 5
    if minor >= 3:
        metrics["completion_token_ids"] = [4, 5]
    if minor >= 4:
        metrics["prompt_token_ids"] = [1, 2, 3]
    if minor >= 5:
        agent["tool_definitions"] = [TOOL]
    if minor >= 6:
        steps[1]["message"] = [{"type": "text", "text": "List the files."}]
    if minor >= 7:
        document["trajectory_id"] = "t1"
    return document
