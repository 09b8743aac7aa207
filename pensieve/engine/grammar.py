"""Structured output: which tokens a grammar allows next, computed on threads beside the steps. No torch.

Each grammar is compiled once, on a thread, and copied for every answer that follows it. ``Structured`` has the requests
whose grammar is being compiled, and those that run. A matcher is a function of the grammar and the output tokens, so
nothing here needs to outlive the engine.

Each answer that follows a grammar has a matcher. Masks are computed on threads while the engine goes on. When the
engine learns an output token it calls ``push``; a thread then advances the matcher and computes the mask of the next
token. Before the engine chooses that token it calls ``collect``, which waits only briefly: an answer whose mask is
late gets no token in that step, and the others do not wait for it.

A mask takes some ten microseconds, but a grammar can make it take a thousand times as long, and building lexer states
in the middle of an answer takes tens of milliseconds. So there are two lanes. An answer whose latest mask was slow
uses a lane with one thread of its own, which yields to the steps on a busy machine. It delays neither the masks of
other answers nor a step, since ``is_expected`` says no until its mask is there. After ``SLOWEST_MASKS`` masks of more
than ``LONGEST_MASK_S`` it fails.

Times are those that the thread computed, so an answer does not pay for a busy machine.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

import numpy as np

from pensieve.core import Grammar, RequestKey
from pensieve.engine.messages import Submit
from pensieve.engine.plan import TokenMask
from pensieve.engine.scheduling.scheduler import OutputToken
from pensieve.errors import InvalidArgument

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


if TYPE_CHECKING:
    from llguidance import LLMatcher

PATIENCE_S: Final = 0.004
"""Longest wait for masks while other tokens of the step wait too."""
MOST_PATIENCE_S: Final = 0.01
"""The same while the device is busy for longer anyway."""
PATIENCE_ALONE_S: Final = 0.05
"""The same if no token of the step can be chosen without a mask."""
SLOW_S: Final = 0.005
"""A mask that took longer was slow. In long bounded strings (``maxLength``) masks take 1 to 3 ms."""
LONGEST_MASK_S: Final = 0.05
SLOWEST_MASKS: Final = 3


@dataclass(slots=True, eq=False)
class _Row:
    """One answer. After ``push`` the thread alone writes ``matcher``, ``mask`` and the three fields below them, and
    last ``ready``. The engine's thread writes the rest."""

    prototype: Prototype
    matcher: LLMatcher | None = None
    """Copied from the prototype for the second token: a queue of requests needs few."""
    mask: TokenMask = field(init=False)
    seconds: float = 0.0
    """Time of the latest mask."""
    long_masks: int = 0
    problem: str = ""
    """Why no mask can be computed any more, in one line."""
    ready: int = 0
    """Number of output tokens before the one that ``mask`` is for."""
    output_tokens: int = 0
    """Output tokens pushed so far."""
    late: bool = False
    """The mask being computed was not there when it was wanted."""
    token: int = 0
    """The token pushed last."""

    def __post_init__(self) -> None:
        self.mask = self.prototype.mask

    @property
    def is_ready(self) -> bool:
        return self.ready == self.output_tokens

    @property
    def is_slow(self) -> bool:
        return self.seconds > SLOW_S

    def advance(self) -> None:
        """Advance by ``token`` and compute the next mask. A thread of a lane calls it."""
        started = time.thread_time()
        try:
            self.problem = self._advance()
        except BaseException as error:  # a panic of the library is no Exception; the thread must go on
            self.problem = f"the matcher failed ({type(error).__name__})"
        self.seconds = time.thread_time() - started
        if self.seconds > LONGEST_MASK_S:
            self.long_masks += 1
        if self.long_masks >= SLOWEST_MASKS and not self.problem:
            self.problem = f"{self.long_masks} tokens took more than {1000 * LONGEST_MASK_S:.0f} ms each"
        self.ready = self.output_tokens

    def _advance(self) -> str:
        """Return why it cannot be done, or ""."""
        if self.matcher is None:
            self.matcher, self.mask = self.prototype.matcher.deep_copy(), self.mask.copy()
        matcher = self.matcher
        matcher.consume_token(self.token)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)
        return first_line(matcher.get_error()) if matcher.is_error() else ""


class Matchers:
    """The matchers of one engine, by request. The engine's thread owns it."""

    def __init__(self, threads: int) -> None:
        """``threads``: threads for masks of ordinary grammars."""
        self.late_masks = 0
        """Masks that were not there when a step wanted them, so that their answers sat it out."""
        self._rows: dict[RequestKey, _Row] = {}
        self._done: SimpleQueue[_Row] = SimpleQueue()
        """Rows whose mask is complete, for ``collect`` to wake up."""
        self._quick: SimpleQueue[_Row | None] = SimpleQueue()
        self._slow: SimpleQueue[_Row | None] = SimpleQueue()
        self._lanes = [self._quick] * threads + [self._slow]
        self._threads: list[threading.Thread] = []

    def begin(self, key: RequestKey, prototype: Prototype) -> None:
        """Begin the answer of a request."""
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._work, args=(lane,), name="masks", daemon=True)
                for lane in self._lanes
            ]
            for thread in self._threads:
                thread.start()
        self._rows[key] = _Row(prototype)

    def push(self, key: RequestKey, token: int) -> None:
        """Take in an output token that is not the last. No effect for a request without a grammar."""
        row = self._rows.get(key)
        if row is not None:
            assert row.is_ready, f"request {key}: a token was chosen without its mask"
            row.token, row.output_tokens, row.late = token, row.output_tokens + 1, False
            (self._slow if row.is_slow else self._quick).put(row)

    def drop(self, key: RequestKey) -> None:
        """Forget a request that has ended, if it had a grammar."""
        self._rows.pop(key, None)

    def is_expected(self, key: RequestKey, output_index: int) -> bool:
        """Whether the mask for output ``output_index`` is there, or should be when it is wanted. True for a request
        that needs none any more."""
        row = self._rows.get(key)
        if row is None or row.ready == output_index:
            return True
        if row.is_slow:
            self._note_if_late(row)
        return not (row.late or row.is_slow)

    def collect(
        self, keys: Collection[RequestKey], *, others: bool, busy_s: float = 0.0
    ) -> dict[RequestKey, TokenMask]:
        """Return the masks for the next token of these requests, as far as they are ready in time; read only, until
        the next ``push``. ``others``: the step chooses tokens that need no mask. ``busy_s``: how long the
        device is busy meanwhile, about."""
        while not self._done.empty():
            self._done.get_nowait()
        rows = {key: self._rows[key] for key in keys if key in self._rows}
        awaited = {row for row in rows.values() if not row.is_ready}
        patience = max(PATIENCE_S, min(busy_s, MOST_PATIENCE_S))
        until = time.monotonic() + (
            patience if others or len(awaited) < len(rows) else max(patience, PATIENCE_ALONE_S)
        )
        while awaited:
            try:
                row = self._done.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                break
            if row in awaited and row.is_ready:
                awaited.discard(row)
                until = min(until, time.monotonic() + patience)
        for row in awaited:
            self._note_if_late(row)
        return {key: row.mask for key, row in rows.items() if row.is_ready and not row.problem}

    def problems(self) -> list[tuple[RequestKey, str]]:
        """Return the requests that cannot go on, and why."""
        return [(key, row.problem) for key, row in self._rows.items() if row.problem and row.is_ready]

    def close(self) -> None:
        """Stop the threads after the masks that they compute."""
        for lane in self._lanes:
            lane.put(None)
        for thread in self._threads:
            thread.join()

    def _note_if_late(self, row: _Row) -> None:
        if not row.late and not row.is_ready:
            row.late = True
            self.late_masks += 1

    def _work(self, lane: SimpleQueue[_Row | None]) -> None:
        if lane is self._slow:
            lower_priority()
        while (row := lane.get()) is not None:
            row.advance()
            self._done.put(row)


class Structured:
    """Compiles the grammars of requests and follows their answers. The engine's thread owns it."""

    def __init__(self, prototypes: Prototypes, threads: int) -> None:
        """``threads``: see ``Matchers``."""
        self.matchers = Matchers(threads)
        self._prototypes = prototypes
        self._compiling: dict[RequestKey, tuple[Submit, float, Future[Prototype]]] = {}

    @property
    def has_compiling(self) -> bool:
        return bool(self._compiling)

    @property
    def num_compiling(self) -> int:
        return len(self._compiling)

    def compile(self, submit: Submit, grammar: Grammar, now: float) -> None:
        """Let a request wait for its grammar. It does not hold up others meanwhile."""
        self._compiling[RequestKey(submit.request)] = submit, now, self._prototypes.prepare(grammar)

    def take_compiled(self) -> Iterator[tuple[Submit, float, Prototype | str]]:
        """Yield each request that waits no more, when it was submitted, and its prototype, or why it has none."""
        for key, (submit, submitted, future) in list(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[key]
            try:
                yield submit, submitted, future.result()
            except (GrammarError, InvalidArgument, ModuleNotFoundError) as error:
                yield submit, submitted, str(error)

    def cancel(self, key: RequestKey) -> None:
        """Forget a request that still waits for its grammar."""
        self._compiling.pop(key, None)

    def on_tokens(self, tokens: Sequence[OutputToken]) -> None:
        """Advance the answers by a step's tokens."""
        for token in tokens:
            if token.finished is None:
                self.matchers.push(token.request, token.token_id)
            else:
                self.matchers.drop(token.request)

    def close(self) -> None:
        self._prototypes.close()
        self.matchers.close()
