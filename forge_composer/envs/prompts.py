"""Every text of the feature-deletion environment that the policy reads, and its tools.

Kept short: on a CPU a prompt token costs as much as a sampled one. Standard library only, so that
tokenizers and warm-up traces are made from the same strings without an OpenEnv server.
"""

from __future__ import annotations

from typing import Any

from forge_composer.types import Message

READ = "read"
WRITE_BODY = "write_body"
RUN_TESTS = "run_tests"
SUBMIT = "submit"

SYSTEM_PROMPT = "Write the missing function body. Test it, then submit."
DELETED_BODY = "raise NotImplementedError"
"""What stands in place of the deleted body."""

WRITTEN = "ok"
"""Answer to `write_body`."""
ALL_PASSED = "all tests passed"
"""Answer to `run_tests` when every visible test passes."""
SUBMITTED = "submitted"
"""Answer to `submit`."""
EPISODE_OVER = "the episode is over"
"""Answer to any call after the episode is done."""
NO_CALL = "no tool call: use read, write_body, run_tests or submit"
"""Answer to a turn without any tool call."""


def _tool(name: str, description: str, **properties: dict[str, str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": sorted(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS: list[dict[str, Any]] = [
    _tool(READ, "Show the module."),
    _tool(WRITE_BODY, "Replace the function body.", body={"type": "string"}),
    _tool(RUN_TESTS, "Run the tests."),
    _tool(SUBMIT, "Hand in."),
]
"""The tools in JSON-schema form, as chat templates take them."""


def initial_messages(module_source: str) -> list[Message]:
    """The first messages of an episode.

    Args:
        module_source: the module whose function body is deleted, without a trailing newline.
    """
    return [
        Message(role="system", content=SYSTEM_PROMPT),
        Message(role="user", content=module_source),
    ]


def call_text(function: str, arguments: tuple[Any, ...]) -> str:
    """`f(1, [2], 'x')`: a call as a test report and a docstring show it."""
    return f"{function}({', '.join(repr(value) for value in arguments)})"


def wrong_value(call: str, expected: Any, got: Any) -> str:
    """A failed test: the function returned another value. All lists of a module's values are plain JSON."""
    return f"{call}: expected {expected!r}, got {clip(repr(got))}"


def raised(call: str, error: str) -> str:
    """A failed test: the function raised; `error` is `ZeroDivisionError: division by zero`."""
    return f"{call}: raised {clip(error)}"


def not_finished(call: str, error: str) -> str:
    """A test whose call gave no result; `error` is `timed out after 1 s`, `the process ended`, `not run`."""
    return f"{call}: {clip(error)}"


def syntax_error(error: str, line: int | None) -> str:
    """Answer to `write_body` with text that is not a function body. `line` counts in the body from 1."""
    where = f" in line {line}" if line is not None else ""
    return f"syntax error{where}: {clip(error)}"


def unknown_tool(name: str) -> str:
    """Answer to a call of a tool that does not exist."""
    return f"unknown tool {clip(name, 40)}: use read, write_body, run_tests or submit"


def bad_arguments(name: str, problem: str) -> str:
    """Answer to a call whose arguments do not fit the tool."""
    return f"bad arguments for {name}: {clip(problem)}"


def malformed_call(problem: str) -> str:
    """Answer to a tool call that does not parse."""
    return f"malformed tool call: {clip(problem)}"


def clip(text: str, limit: int = 120) -> str:
    """At most `limit` characters of one line; model-written text must not flood the context."""
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
