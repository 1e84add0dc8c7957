"""The sides of a pair in the policy's tokens: recorded ones where they are this policy's, else rendered ones.

Whatever is rendered is read back, and has to be the action that it was rendered from: text that spells a
tool call, or a template that leaves something out, would teach another action.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forge_composer.preferences.steps import StepState
from forge_composer.rendering.renderer import ChatRenderer, TemplateError
from forge_composer.rendering.tool_calls import parse_action, to_message
from forge_composer.teachers.actions import TextEquivalence, canonical_action
from forge_composer.types import ParsedAction


@dataclass(slots=True, frozen=True)
class RecordedTokens:
    """Context of a step and the student's turn.

    `completion_ids` may lack a turn-end token, where the turn was cut off. `rendered`: they were not sampled,
    but written by the chat template.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    rendered: bool = False


class PolicyTokens:
    """Tokens of one policy."""

    def __init__(self, renderer: ChatRenderer, text: TextEquivalence) -> None:
        self.renderer, self.text = renderer, text

    def recorded(self, state: StepState, canonical: str | None) -> RecordedTokens | None:
        """The step's recorded tokens; None if there are none, or if they are ids of another vocabulary.

        Args:
            state: the step.
            canonical: the student's action; None if it does not parse.
        """
        if state.prompt_ids is None or state.completion_ids is None:
            return None
        if not self._reads(state.completion_ids, canonical):
            return None
        return RecordedTokens(state.prompt_ids, state.completion_ids)

    def rendered_step(self, state: StepState, canonical: str | None) -> RecordedTokens:
        """The step's context and the student's turn as the chat template writes them.

        Raises:
            TemplateError: it cannot.
        """
        prompt = _rendered(lambda: self.renderer.initial_ids(state.messages, state.tools))
        return RecordedTokens(prompt, self.turn(state, state.action, canonical), rendered=True)

    def turn(self, state: StepState, action: ParsedAction, canonical: str | None) -> tuple[int, ...]:
        """An action at a step as the chat template writes it, with the turn-end token.

        Raises:
            TemplateError: it cannot, or the tokens read as another action than `canonical`.
        """
        history = [*state.messages, to_message(action)]
        ids = _rendered(lambda: self.renderer.turn_ids(history, state.tools))
        if not self._reads(ids, canonical):
            raise TemplateError(
                f"{self.renderer.name}: the template writes an action so that it reads as another one"
            )
        return ids

    def _reads(self, ids: tuple[int, ...], canonical: str | None) -> bool:
        """Whether the tokens read as the action."""
        try:
            said = self.renderer.decode(ids)
        except (ValueError, TypeError, IndexError, OverflowError):
            return False  # no ids of this tokenizer
        return canonical_action(parse_action(said), text=self.text) == canonical


def _rendered(render: Callable[[], list[int]]) -> tuple[int, ...]:
    """What a template renders. Raises: TemplateError, whatever the template raises: it is others' program."""
    try:
        return tuple(render())
    except TemplateError:
        raise
    except Exception as error:
        raise TemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error
