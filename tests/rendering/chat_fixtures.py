"""A small trained tokenizer and chat templates of several kinds, for tests of rendering and traces."""

from __future__ import annotations

import functools
from typing import Any

from forge_composer.rendering.renderer import ChatRenderer

_TOOLS_AND_SYSTEM = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% endif %}Tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif -%}
"""

_CALLS = """\
{%- for call in m.tool_calls or [] -%}
{{ '\n' if m.content or not loop.first }}<tool_call>
{{ '{"name": ' ~ (call.function.name | tojson) ~ ', "arguments": ' }}{{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
"""

_TOOL_ANSWERS = """\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
{{ '\n<tool_response>' }}
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif -%}
"""


def _template(thinking: str, generation: str = "<|im_start|>assistant\n", before: str = "") -> str:
    return (
        _TOOLS_AND_SYSTEM
        + before
        + "{%- for m in messages -%}{%- if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
        + "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
        + thinking
        + "{{ m.content }}"
        + _CALLS
        + "<|im_end|>\n{% elif m.role == 'tool' -%}"
        + _TOOL_ANSWERS
        + "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt %}"
        + generation
        + "{% endif -%}"
    )


_THINK = "{{ '<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n\\n' }}"
_LAST_QUERY = (
    "{%- set ns = namespace(query=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.query = loop.index0 -%}{%- endif -%}{%- endfor -%}"
)

KEEPS_ALL = _template("{% if m.reasoning_content %}" + _THINK + "{% endif %}")
"""Extends its own past, whatever the history."""

STRIPS_BEFORE_LAST_QUERY = _template(
    "{% if m.reasoning_content and loop.index0 > ns.query %}" + _THINK + "{% endif %}", before=_LAST_QUERY
)
"""As Qwen3 does: reasoning is kept until the next user message."""

STRIPS_ALL_EARLIER = _template("{% if m.reasoning_content and loop.last %}" + _THINK + "{% endif %}")
"""Reasoning is kept in the last message only."""

NO_THINK_PROMPT = _template("", generation="<|im_start|>assistant\n<think>\n\n</think>\n\n")
"""Switches reasoning off by a generation prompt that history does not keep."""

OPENS_THINKING = _template(_THINK, generation="<|im_start|>assistant\n<think>\n")
"""The generation prompt opens the reasoning, as thinking-only models do."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Read a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]


@functools.cache
def tokenizer_json() -> str:
    """Byte-level BPE with merges (so that splits matter), ChatML specials, and Qwen's non-special markup."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    corpus = [
        '<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>',
        "def add(a, b):\n    return a + b\n\n<tool_response>\nadd(2, 3): expected 5\n</tool_response>",
        "<|im_start|>user\nassistant\nsystem\n\nthe function adds two numbers\n\n",
    ] * 8
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator(corpus, trainer)
    inner.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    markup = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>"]
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in markup])
    return str(inner.to_str())


def make_tokenizer(template: str | None) -> Any:
    """A fresh transformers tokenizer with the given chat template."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer_json()),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


@functools.cache
def make_renderer(template: str = KEEPS_ALL) -> ChatRenderer:
    """A renderer with the given chat template."""
    return ChatRenderer(make_tokenizer(template))
