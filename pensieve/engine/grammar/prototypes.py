"""Compiled grammars: each is compiled once, on a thread, and copied for every answer that follows it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from pensieve.core import Grammar
from pensieve.engine.plan import TokenMask

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_PROTOTYPES: Final = 32
"""Compiled grammars that are kept, the most recently used ones."""
LEXER_STATES: Final = 20_000
"""Most lexer states of a grammar, 1 to 2 kB each; all its matchers share them."""
COMPILERS: Final = 2
NICENESS: Final = 5
"""Lowers the priority of work on grammars that may take long: on a busy machine the steps of the model go first."""


class GrammarError(Exception):
    """A grammar that cannot be followed. The text says why, in one line."""


@dataclass(frozen=True, slots=True)
class Prototype:
    """The start of all answers that follow one grammar."""

    matcher: LLMatcher
    """Never advanced. Copies share its lexer, whose states are then built once for all of them."""
    mask: TokenMask
    """Mask of the first token."""


class Prototypes:
    """Compiles grammars. The engine's thread owns it."""

    def __init__(self, make_tokenizer: Callable[[], LLTokenizer], vocab: int) -> None:
        """``make_tokenizer`` is called at once, on a thread: with a large vocabulary it takes seconds, for which the
        first grammar would wait. The end of the engine does not wait for it."""
        self._words = -(-vocab // 32)
        self._threads = ThreadPoolExecutor(COMPILERS, "grammars", initializer=lower_priority)
        self._tokenizer: Future[LLTokenizer] = Future()
        threading.Thread(target=self._prepare, args=(make_tokenizer,), name="vocabulary", daemon=True).start()
        self._made: OrderedDict[Grammar, Future[Prototype]] = OrderedDict()

    def prepare(self, grammar: Grammar) -> Future[Prototype]:
        """Return the prototype to be, compiled on a thread. It may raise GrammarError, or InvalidArgument if the
        model's tokenizer cannot be used."""
        found = self._made.get(grammar)
        if found is None or (found.done() and found.exception() is not None):
            found = self._made[grammar] = self._threads.submit(self._compile, grammar, self._tokenizer)
        self._made.move_to_end(grammar)
        while len(self._made) > MOST_PROTOTYPES:
            self._made.popitem(last=False)
        return found

    def close(self) -> None:
        self._tokenizer.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, make_tokenizer: Callable[[], LLTokenizer]) -> None:
        with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
            try:
                self._tokenizer.set_result(make_tokenizer())
            except BaseException as error:  # a panic of the library is no Exception; requests wait for this
                self._tokenizer.set_exception(error)

    def _compile(self, grammar: Grammar, tokenizer: Future[LLTokenizer]) -> Prototype:
        from llguidance import LLMatcher, LLParserLimits  # late: an engine without grammars does without

        limits = LLParserLimits(
            step_max_items=grammar.step_items, max_lexer_states=LEXER_STATES, verbose_errors=False
        )
        made, mask = tokenizer.result(), np.zeros(self._words, np.int32)
        try:
            # Its errors name parts of the grammar, which belongs to the caller, so none is logged.
            matcher = LLMatcher(made, grammar.text, log_level=0, limits=limits)
            if not matcher.is_error():
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        except BaseException as error:  # a panic of the library is no Exception; it must not end the engine
            raise GrammarError(f"the grammar cannot be compiled ({type(error).__name__})") from error
        if matcher.is_error():
            raise GrammarError(first_line(matcher.get_error()))
        return Prototype(matcher, mask)


def lower_priority() -> None:
    """Let the calling thread yield to the steps of the model."""
    if sys.platform == "linux":  # elsewhere this is the priority of the whole process
        os.nice(NICENESS)


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
