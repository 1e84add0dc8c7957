"""Messages to token ids, in a way that never tokenises sampled text again.

The prompt of the next turn is

    prompt ids + completion ids + continuation ids

where the continuation is only what follows the sampled turn-end token: the template's bridge (often a
newline), the environment's answers and the next generation prompt. It is cut out of the template's own
rendering of the whole history and tokenised alone; its left edge is a special token, at which every
tokenizer splits, so the ids are those it would have inside the whole text.

A continuation exists only where the template extends its own past. A template that rewrites earlier
turns (the usual case: it strips earlier thinking) gives `None`; the caller then renders the history
afresh and opens a new training sample.

Text that comes from outside (observations, code that the policy wrote and a tool printed) may spell a
special token. It is tokenised as ordinary characters, so that it cannot close a turn or open another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_composer.rendering.tool_calls import CALL_CLOSE, CALL_OPEN, THINK_CLOSE, THINK_OPEN
from forge_composer.types import Message

Tools = Sequence[dict[str, Any]]

_GUARD_BASE = 0xF0000
"""First code point of the private plane whose characters stand for guarded special tokens."""

_POLICY_MARKUP = frozenset({CALL_OPEN, CALL_CLOSE, THINK_OPEN, THINK_CLOSE})
"""Markup that the policy may write itself; it stays markup in an assistant turn."""


class TemplateError(ValueError):
    """The tokenizer's chat template cannot be used for rollouts."""


@dataclass(slots=True, frozen=True)
class PrefixReport:
    """Whether the template extends its own past, by kind of history."""

    plain: bool
    """Turns of plain text."""
    tool_calls: bool
    """Turns with tool calls, answered by tool messages."""
    thinking: bool
    """Turns with reasoning and tool calls, answered by tool messages."""
    thinking_then_user: bool
    """Turns with reasoning, answered by a user message."""


class ChatRenderer:
    """Renders chats with a Hugging Face tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, *, extra_turn_end_ids: Sequence[int] = (), name: str = "") -> None:
        """Take a transformers tokenizer; `name` is for error messages.

        Raises:
            TemplateError: there is no template, or it does not end turns with a special token.
        """
        self.tokenizer = tokenizer
        self.name = name or str(getattr(tokenizer, "name_or_path", "")) or "the tokenizer"
        if not tokenizer.chat_template:
            raise TemplateError(f"{self.name} has no chat template (chat_template.jinja)")
        specials = sorted(
            {str(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special},
            key=lambda text: (-len(text), text),
        )
        self._guards = {text: chr(_GUARD_BASE + index) for index, text in enumerate(specials)}
        self._guard_ids = {guard: self._as_characters(text) for text, guard in self._guards.items()}
        self._special_pattern = _alternation(specials)
        self._guard_pattern = _alternation(sorted(self._guard_ids), group=True)
        self._turn_end = self._find_turn_end()
        self._turn_end_id = int(tokenizer.convert_tokens_to_ids(self._turn_end))
        ends = [self._turn_end_id, *extra_turn_end_ids]
        if tokenizer.eos_token_id is not None:
            ends.append(int(tokenizer.eos_token_id))
        self.turn_end_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        """Ids that end an assistant turn: the template's own first, then other end-of-sequence ids."""

    @classmethod
    def from_folder(cls, folder: str | Path) -> ChatRenderer:
        """Load tokenizer, template and end-of-sequence ids from a checkpoint folder (no network)."""
        from transformers import AutoTokenizer

        path = Path(folder)
        if not path.is_dir():
            raise FileNotFoundError(f"no tokenizer folder at {path}")
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        return cls(tokenizer, extra_turn_end_ids=_generation_eos_ids(path), name=str(path))

    # -- messages to ids ----------------------------------------------------------------------------

    def initial_ids(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Prompt ids of a chat, with the generation prompt at the end."""
        return self._encode(self._render(messages, tools))

    def rerender_ids(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Prompt ids of a history whose past the template rewrites. They open a new training sample."""
        return self.initial_ids(messages, tools)

    def continuation_ids(
        self, history: Sequence[Message], answers: Sequence[Message], tools: Tools
    ) -> list[int] | None:
        """Ids that follow a sampled turn and its turn-end token in the next prompt.

        Args:
            history: all messages up to and with the assistant turn, as parsed.
            answers: the environment's messages after it.
            tools: tool definitions.

        Returns:
            The ids, or None if the template does not extend this history.

        Raises:
            ValueError: the history does not end with an assistant turn.
        """
        suffix = self._continuation_text(history, answers, tools)
        if suffix is None:
            return None
        ids = self._encode(self._turn_end + suffix)
        if not ids or ids[0] != self._turn_end_id:
            raise TemplateError(f"{self.name}: the tokenizer does not keep {self._turn_end!r} as one token")
        return ids[1:]

    def _continuation_text(
        self, history: Sequence[Message], answers: Sequence[Message], tools: Tools
    ) -> str | None:
        if not history or history[-1]["role"] != "assistant":
            raise ValueError("a continuation needs a history that ends with an assistant turn")
        # Induction over the turns: `before` is what the previous call found to extend its own past.
        before = self._render(history[:-1], tools)
        after = self._render([*history, *answers], tools)
        if not after.startswith(before):
            return None
        turn, end, suffix = after[len(before) :].partition(self._turn_end)
        last = history[-1]
        if not end or not _says(turn, self._guarded(last)):
            return None
        if last.get("reasoning_content"):
            silent = Message(**{key: value for key, value in last.items() if key != "reasoning_content"})  # type: ignore[typeddict-item]
            if self._render([*history[:-1], silent, *answers], tools) == after:
                return None  # the template leaves the reasoning out
        return suffix

    def is_prefix_preserving(self, tools: Tools = ()) -> PrefixReport:
        """Try the template on small histories of two turns, so that its behaviour is known at the start."""
        call = {"type": "function", "function": {"name": "run", "arguments": {"n": 1}}}
        text = Message(role="assistant", content="one moment")
        calling = Message(role="assistant", content="", tool_calls=[{"id": "call_0", **call}])
        thinking = Message(**{**calling, "reasoning_content": "the sum is off by one"})
        musing = Message(**{**text, "reasoning_content": "the sum is off by one"})
        user = Message(role="user", content="go on")
        result = Message(role="tool", content="2 passed", tool_call_id="call_0", name="run")
        return PrefixReport(
            plain=self._extends(text, user, tools),
            tool_calls=self._extends(calling, result, tools),
            thinking=self._extends(thinking, result, tools),
            thinking_then_user=self._extends(musing, user, tools),
        )

    def _extends(self, turn: Message, answer: Message, tools: Tools) -> bool:
        history = [Message(role="user", content="begin"), turn]
        if self._continuation_text(history, [answer], tools) is None:
            return False
        return self._continuation_text([*history, answer, turn], [answer], tools) is not None

    def turn_ids(self, history: Sequence[Message], tools: Tools) -> list[int]:
        """Ids of the history's last assistant turn with its turn-end token, as the template writes it.

        For turns that nobody sampled: demonstrations, and a teacher's action as a preference.
        """
        before = self._render(history[:-1], tools)
        after = self._render(history, tools, generation=False)
        turn, end, _ = after.removeprefix(before).partition(self._turn_end)
        if not after.startswith(before) or not end:
            raise TemplateError(
                f"{self.name}: the template does not write an assistant turn after its prompt"
            )
        return self._encode(turn + end)

    # -- ids to text --------------------------------------------------------------------------------

    def decode(self, completion_ids: Sequence[int]) -> str:
        """Text of a completion without its turn-end token; other special tokens stay visible."""
        ids = list(completion_ids)
        if self.ends_turn(ids):
            ids.pop()
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def ends_turn(self, completion_ids: Sequence[int]) -> bool:
        """True if the completion ends with a turn-end token; without one it has no continuation."""
        return bool(completion_ids) and completion_ids[-1] in self.turn_end_ids

    # -- inside -------------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Message], tools: Tools, *, generation: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                [self._guarded(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=generation,
                tokenize=False,
            )
        )

    def _encode(self, text: str) -> list[int]:
        if self._guard_pattern is None:
            return self._plain_ids(text)
        ids: list[int] = []
        for piece in self._guard_pattern.split(text):
            if piece in self._guard_ids:
                ids += self._guard_ids[piece]
            elif piece:
                ids += self._plain_ids(piece)
        return ids

    def _plain_ids(self, text: str) -> list[int]:
        return [int(i) for i in self.tokenizer.encode(text, add_special_tokens=False)]

    def _as_characters(self, special: str) -> list[int]:
        """Ids that spell a special token's text; cut in two, it is not recognised as the token."""
        return self._plain_ids(special[:1]) + self._plain_ids(special[1:])

    def _guarded(self, message: Message) -> dict[str, Any]:
        """The message with every spelled special token replaced by a character that stands for it."""
        keep = _POLICY_MARKUP if message["role"] == "assistant" else frozenset()
        return {key: value if key == "role" else self._guard(value, keep) for key, value in message.items()}

    def _guard(self, value: Any, keep: frozenset[str]) -> Any:
        if isinstance(value, str):
            if self._special_pattern is None:
                return value
            return self._special_pattern.sub(
                lambda found: found[0] if found[0] in keep else self._guards[found[0]], value
            )
        if isinstance(value, dict):
            return {self._guard(key, keep): self._guard(item, keep) for key, item in value.items()}
        if isinstance(value, list):
            return [self._guard(item, keep) for item in value]
        return value

    def _find_turn_end(self) -> str:
        """The special token that the template writes after an assistant turn."""
        marker = "a turn of its own"
        chat = [Message(role="user", content="begin"), Message(role="assistant", content=marker)]
        text = self._render(chat, (), generation=False)
        _, found, rest = text.rpartition(marker)
        end = self._special_pattern.search(rest) if found and self._special_pattern else None
        if end is None:
            raise TemplateError(
                f"{self.name}: the chat template writes no special token after an assistant turn, so "
                "nothing tells the generator where the turn ends"
            )
        return end[0]


def _says(turn: str, message: dict[str, Any]) -> bool:
    """Whether the template's rendering of a turn holds the turn's text and the names of its calls."""
    names = [call["function"]["name"] for call in message.get("tool_calls", [])]
    position = 0
    for name in names:
        position = turn.find(name, position)
        if position < 0:
            return False
        position += len(name)
    return str(message["content"]).strip() in turn


def _alternation(texts: Sequence[str], *, group: bool = False) -> re.Pattern[str] | None:
    if not texts:
        return None
    body = "|".join(map(re.escape, texts))
    return re.compile(f"({body})" if group else body)


def _generation_eos_ids(folder: Path) -> list[int]:
    """End-of-sequence ids that `generation_config.json` names beside the tokenizer's own."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return []
    value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    if value is None:
        return []
    return [int(i) for i in (value if isinstance(value, list) else [value])]
