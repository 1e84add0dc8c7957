"""Every text of a hint, and every text that a judge reads, in one place.

The policy of the CPU default was warmed up to obey `DEMONSTRATION` and `FEEDBACK` exactly as they are, before
its first turn: in half of the cases as a user message of its own, in the other half on a new line at the end
of the last message.
"""

from __future__ import annotations

DEMONSTRATION = "Hint: this body is right:\n{body}"
"""A successful sibling's text: the call's argument `body`."""
FEEDBACK = "Hint: an earlier attempt failed: {feedback}"
"""What the environment said about this turn."""
ACTION = "Hint: this action was right:\n{action}"
"""A successful sibling's action of any other form, as the calls' JSON or as text."""
REASONED = "Hint: this led to success:\n{reasoning}\n\n{demonstration}"
"""A demonstration with the reasoning before it."""
LEAD = "Hint: "
"""How a hint begins; put before a judge's answer that does not."""

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

JUDGE_SYSTEM = (
    "You coach an agent that works in turns with tools. You read one attempt and say what the agent should "
    "have known just before the marked turn. Answer with one hint and nothing else: at most two sentences, "
    "addressed to the agent, concrete, about that turn only. Do not mention that the attempt was made or "
    "that the turn is marked."
)
"""System message of the judge."""
JUDGE_REQUEST = (
    "The task:\n{task}\n\n"
    "What happened before:\n{before}\n\n"
    "THE MARKED TURN and what came after it:\n{after}\n\n"
    "What is wrong: {problem}\n\n"
    "One hint, of at most {max_chars} characters:"
)
"""User message of the judge."""
JUDGE_PROBLEMS = {
    "low_reward": "the attempt failed in the end; nothing that was reported says why",
    "repeated_action": "the agent had done the same before, to no avail",
    "truncated_turn": "the turn was cut off because it was too long",
}
"""What is wrong, in words, for the kinds that no message of the environment explains."""
