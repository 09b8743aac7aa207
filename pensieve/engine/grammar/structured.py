"""The requests of an engine that follow a grammar: those whose grammar is being compiled, and those that run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from pensieve.core import Grammar, RequestKey
from pensieve.engine.grammar.matchers import Matchers
from pensieve.engine.grammar.prototypes import GrammarError, Prototype, Prototypes
from pensieve.engine.messages import Submit
from pensieve.engine.scheduling.scheduler import OutputToken
from pensieve.errors import InvalidArgument


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
