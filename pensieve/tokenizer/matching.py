"""The vocabulary as llguidance needs it: the bytes of each token, as the text of answers is defined on them.

Special tokens are no text, so only a grammar that names one (``<|end|>``) allows it. The end-of-turn tokens are allowed
where the grammar may end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from pensieve.errors import InvalidArgument
from pensieve.tokenizer.detokenizer import TokenBytes
from pensieve.tokenizer.encoding import without_prefix_space
from pensieve.tokenizer.folder import TokenizerFolder, hidden_ids, read_folder

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class _Vocabulary:
    """The parts of a tokenizer that ``llguidance.TokenizerWrapper`` reads."""

    bos_token_id = None

    def __init__(self, folder: TokenizerFolder, eos_token_ids: Sequence[int]) -> None:
        # Text that a grammar forces continues other text, so no space goes before it. It may spell a control token: as
        # that token it would end the answer, or fail.
        spec = without_prefix_space(json.loads(folder.backend.to_str()))
        self._backend = Tokenizer.from_str(json.dumps(spec))
        self._backend.encode_special_tokens = True
        hidden = hidden_ids(folder.backend)
        self._table = TokenBytes(folder.backend, folder.decoder, hidden)
        self.eos_token_id = eos_token_ids[0]
        self.tokens = [
            self._table.name(token).encode() or self._table[token] for token in range(folder.vocab_size)
        ]
        self.special_token_ids = sorted(token for token in hidden if token < folder.vocab_size)

    def __call__(self, text: str | bytes) -> list[int]:
        data, words = (text, text.decode()) if isinstance(text, bytes) else (text.encode(), text)
        found: list[int] = self._backend.encode(words, add_special_tokens=False).ids
        if max(found, default=0) < len(self.tokens) and b"".join(self._table[one] for one in found) == data:
            return found
        # The tokenizer changes this text, for example to composed characters; the grammar means it as it is.
        return self._table.spell(words) or found


def grammar_tokenizer(folder: TokenizerFolder, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Return the vocabulary for llguidance's matchers; with 150,000 tokens it takes a second. Raises InvalidArgument
    without an end-of-turn token, since no answer would end, and ModuleNotFoundError without llguidance."""
    if not eos_token_ids:
        raise InvalidArgument(
            "the model names no end-of-turn token (eos_token_id), where an answer with a format would end"
        )
    from llguidance import LLTokenizer, TokenizerWrapper  # late: only answers with a format need it

    wrapper = TokenizerWrapper(_Vocabulary(folder, eos_token_ids))
    return LLTokenizer(wrapper, n_vocab=folder.vocab_size, eos_token=list(eos_token_ids))


def read_grammar_tokenizer(model: Path, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Return the vocabulary of a model folder or GGUF file."""
    return grammar_tokenizer(read_folder(model), eos_token_ids)
