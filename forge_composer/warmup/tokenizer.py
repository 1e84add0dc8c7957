"""A small byte-level BPE tokenizer with the special tokens and the chat template of the tiny policy."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

PIECES = r" ?[A-Za-z_]+| ?[0-9]|[^A-Za-z0-9_\n]+?(?= ?[A-Za-z0-9_])|[^A-Za-z0-9_\n]+|\n+"
"""What merges never cross. Words and single digits keep a leading space; the punctuation between two words
is one piece, so that JSON scaffolding becomes few tokens while every number stays readable digit by digit."""


def chat_template() -> str:
    """The template's Jinja source."""
    return files("forge_composer.warmup").joinpath("chat_template.jinja").read_text(encoding="utf-8")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer; deterministic for equal texts.

    Args:
        texts: plain texts, without special tokens.
        vocab_size: size of the whole vocabulary, special tokens included.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [*SPECIAL_TOKENS, *MARKUP_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(added),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    )
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template()
    return fast
