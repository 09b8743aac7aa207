"""Random answers under a grammar: logits that know nothing, and masks."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pensieve.tokenizer import ChatTokenizer
from pensieve.tokenizer.matching import read_grammar_tokenizer
from support.tokenizers_ import byte_level, write_folder
from support.tool_templates import QWEN25, write_model

MARKED, SPELLED = "marked", "spelled"
"""Vocabularies in which the marks of calls and thoughts are tokens, and are not."""
_WANDERS = 60
"""Tokens after which an answer is led to its end."""
_LAST = 1500


@functools.cache
def vocabulary(kind: str) -> tuple[ChatTokenizer, LLTokenizer]:
    """A tokenizer, and the same for masks."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        if kind == MARKED:
            write_model(model, QWEN25, "<|im_end|>")
        else:
            text = byte_level().replace('"<think>"', '"<other>"')
            write_folder(model, text, QWEN25, eos="<|im_end|>")
        found = ChatTokenizer.from_folder(model)
        return found, read_grammar_tokenizer(model, found.eos_token_ids)


@functools.cache
def _endings(kind: str) -> tuple[int, ...]:
    """Tokens that lead to an end, the best first."""
    found, _ = vocabulary(kind)
    spelled = (found.spell(text, ()) or () for text in ('"', "}", "]", ",", ":", "e", "l", "0", "1"))
    return tuple(ids[0] for ids in spelled if len(ids) == 1)


def random_answer(grammar: str, seed: int, kind: str = MARKED) -> str | None:
    """An answer that ended by itself; None for one that had to be cut."""
    found, tokenizer = vocabulary(kind)
    matcher = LLMatcher(tokenizer, grammar, limits=LLParserLimits(step_max_items=2000), log_level=0)
    dice = np.random.default_rng(seed)
    marks = [i for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
             if (i := found.mark_id(mark)) is not None]  # fmt: skip
    output: list[int] = []
    (eos,) = found.eos_token_ids
    while len(output) < _LAST:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        assert not matcher.is_error(), (matcher.get_error(), output)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: found.vocab_size])
        assert len(allowed), "nothing is allowed, not even the end"
        token = _choose(set(allowed.tolist()), marks, _endings(kind), len(output) > _WANDERS, eos, dice)
        if token == eos:
            return found.decode(output)
        assert matcher.consume_token(token), matcher.get_error()
        output.append(token)
    return None


def _choose(
    allowed: set[int],
    marks: Sequence[int],
    endings: Sequence[int],
    ends: bool,
    eos: int,
    dice: np.random.Generator,
) -> int:
    if eos in allowed and (ends or len(allowed) == 1 or dice.random() < 0.2):
        return eos
    words = sorted(allowed - {eos})
    if ends and dice.random() < 0.9:
        words = [one for one in (*marks, *endings) if one in allowed][:1] or words
    elif any(one in allowed for one in marks) and dice.random() < 0.3:
        words = [one for one in marks if one in allowed]
    return int(words[int(dice.integers(len(words)))])
