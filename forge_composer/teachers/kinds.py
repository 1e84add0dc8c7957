"""The kinds of what can come of a call to a teacher."""

from __future__ import annotations

import enum


class ReplyKind(enum.StrEnum):
    """What came of a call to a teacher."""

    OK = "ok"
    """A message whose text or tool calls can be read."""
    NO_CHOICE = "no_choice"
    """A completion without any choice."""
    BAD_ARGUMENTS = "bad_arguments"
    """The arguments of a tool call are no JSON object, or hold what no later stage can carry."""
    UNKNOWN_TOOL = "unknown_tool"
    """A call of a tool that was not offered."""
    REFUSAL = "refusal"
    """The model declines, or a content filter does."""
    LENGTH = "length"
    """The answer was cut at the token limit."""
    WRONG_SCHEMA = "wrong_schema"
    """JSON that is no chat completion."""
    EMPTY = "empty"
    """No body, or a message that says nothing."""
    TRUNCATED = "truncated"
    """The body ended early or is not JSON."""
    TOO_LARGE = "too_large"
    """The body is larger than a completion can be; the rest of it was not read."""
    RATE_LIMITED = "rate_limited"
    """Status 429."""
    SERVER_ERROR = "server_error"
    """Status 5xx, or an error of the model in the middle of its answer."""
    UNAUTHORIZED = "unauthorized"
    """Status 401: the key is missing or refused."""
    PAYMENT_REQUIRED = "payment_required"
    """Status 402: the account is empty."""
    FORBIDDEN = "forbidden"
    """Status 403: not allowed, or stopped by moderation."""
    NOT_FOUND = "not_found"
    """Status 404: no such model or address."""
    BAD_REQUEST = "bad_request"
    """Any other status that is not 200."""
    CONNECTION = "connection"
    """The endpoint could not be reached, or the connection was lost."""
    TIMEOUT = "timeout"
    """No whole reply in time, or status 408."""
    BENCHED = "benched"
    """Not sent: the circuit breaker is open."""
    OVER_BUDGET = "over_budget"
    """Not sent: it could have passed the budget."""
    CANCELLED = "cancelled"
    """The caller gave up while the call was in flight."""
    LOST = "lost"
    """The process ended while the call was in flight."""


ANSWERED = frozenset(
    {
        ReplyKind.OK, ReplyKind.NO_CHOICE, ReplyKind.BAD_ARGUMENTS, ReplyKind.UNKNOWN_TOOL,
        ReplyKind.REFUSAL, ReplyKind.LENGTH, ReplyKind.WRONG_SCHEMA,
    }
)  # fmt: skip
"""The teacher has answered, for better or worse: kept in the ledger and never asked again."""
RETRIED = frozenset(
    {
        ReplyKind.EMPTY, ReplyKind.TRUNCATED, ReplyKind.RATE_LIMITED, ReplyKind.SERVER_ERROR,
        ReplyKind.CONNECTION, ReplyKind.TIMEOUT,
    }
)  # fmt: skip
"""May be gone at the next attempt."""
NOT_SENT = frozenset({ReplyKind.BENCHED, ReplyKind.OVER_BUDGET})
"""No request was made."""

_STATUS_KINDS = {
    401: ReplyKind.UNAUTHORIZED,
    402: ReplyKind.PAYMENT_REQUIRED,
    403: ReplyKind.FORBIDDEN,
    404: ReplyKind.NOT_FOUND,
    408: ReplyKind.TIMEOUT,
    429: ReplyKind.RATE_LIMITED,
}
_GAVE_UP_WAITING = frozenset({408, 499, 502, 504, 520, 521, 522, 523, 524})
"""Statuses of a gateway that left a model which may have run to its end."""


def status_kind(status: int) -> ReplyKind:
    """The kind of a reply whose HTTP status is not 200."""
    if status >= 500:
        return ReplyKind.SERVER_ERROR
    return _STATUS_KINDS.get(status, ReplyKind.BAD_REQUEST)


def is_free(status: int) -> bool:
    """True if an error of this status comes from before any token was made, so that nobody bills it."""
    return 300 <= status < 600 and status not in _GAVE_UP_WAITING
