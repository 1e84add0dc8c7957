"""Every text of a hint, in one place. The policy of the CPU default was warmed up on the first two forms."""

from __future__ import annotations

DEMONSTRATION = "Hint: this body is right:\n{body}"
"""A successful sibling's text: of a call with one string argument."""
FEEDBACK = "Hint: an earlier attempt failed: {feedback}"
"""What the environment said about this turn."""
ACTION = "Hint: this action was right:\n{action}"
"""A successful sibling's action of any other form, as the calls' JSON or as text."""

TEMPLATES = {
    "malformed_call": 'Hint: a tool call is one JSON object with "name" and "arguments". Tools: {tools}.',
    "unknown_tool": "Hint: the tools are {tools}.",
    "bad_arguments": "Hint: {message}.",
    "no_call": "Hint: call a tool. Tools: {tools}.",
    "repeated_action": "Hint: this was tried before and did not help. Do something else.",
    "truncated_turn": "Hint: be brief.",
    "episode_over": "Hint: nothing follows a submission.",
}
"""By kind of fault; others are left to the next source. `{tools}`: their names; `{message}`: the
environment's."""
