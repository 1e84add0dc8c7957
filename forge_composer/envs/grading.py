"""Comparing what a function returned with what was expected. Standard library only.

Grading is input/output replay: the sandbox gets the source and argument tuples and returns JSON; the
expected values stay on this side and are compared here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forge_composer.envs import prompts
from forge_composer.types import Feedback


@dataclass(slots=True, frozen=True)
class Case:
    """One test: positional arguments and the value expected, both plain JSON values."""

    arguments: tuple[Any, ...]
    expected: Any


@dataclass(slots=True, frozen=True)
class CallResult:
    """What one call did: it returned `value`, or `error` says why it did not.

    `kind`: `value`; `raised` (an exception, `error` is its type and text); `timeout` (the time limit);
    `lost` (the process ended or broke the protocol before this call answered).
    """

    kind: Literal["value", "raised", "timeout", "lost"]
    value: Any = None
    error: str = ""


def passed(case: Case, result: CallResult) -> bool:
    """True if the call returned exactly the expected value: 1, 1.0 and True are three values."""
    return result.kind == "value" and _canonical(result.value) == _canonical(case.expected)


def passed_count(cases: Sequence[Case], results: Sequence[CallResult]) -> int:
    """How many cases passed; both sequences have the same length."""
    return sum(passed(case, result) for case, result in zip(cases, results, strict=True))


def failures(function: str, cases: Sequence[Case], results: Sequence[CallResult]) -> list[Feedback]:
    """One remark for each case that failed, in order (kinds `test_failed` and `timeout`)."""
    remarks = []
    for case, result in zip(cases, results, strict=True):
        if passed(case, result):
            continue
        call = prompts.call_text(function, case.arguments)
        details: dict[str, Any] = {"call": call, "expected": case.expected}
        if result.kind == "value":
            message = prompts.wrong_value(call, case.expected, result.value)
            details["got"] = prompts.clip(repr(result.value))
        else:
            tell = prompts.raised if result.kind == "raised" else prompts.not_finished
            message = tell(call, result.error)
            details["error"] = result.error
        kind = "timeout" if result.kind == "timeout" else "test_failed"
        remarks.append(Feedback(kind, message, details))
    return remarks


def report(remarks: Sequence[Feedback]) -> str:
    """The answer to `run_tests`: the failed tests, one a line, or that all passed."""
    return "\n".join(remark.message for remark in remarks) or prompts.ALL_PASSED


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
