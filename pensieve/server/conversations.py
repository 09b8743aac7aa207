"""The conversation service without gRPC: sessions, turns, and facts about the server. One per process."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import pensieve
from pensieve.core import packed_length
from pensieve.engine.messages import ResidentTokens
from pensieve.errors import PensieveError
from pensieve.server import ids
from pensieve.server.admission import AdmissionGate, GateLimits
from pensieve.server.grammars.checker import GrammarChecker
from pensieve.server.history.binding import ServedModel
from pensieve.server.history.rendering import ItemStamp, Renderer
from pensieve.server.history.transcript import Transcript
from pensieve.server.keys import TenantTable
from pensieve.server.links.engine_link import EngineLink, context_limit
from pensieve.server.operations.usage import UsageTracker
from pensieve.server.sessions.compaction import Compactor, IdleCompaction
from pensieve.server.sessions.lookup import RequestClaims, find_turn
from pensieve.server.sessions.quotas import StorageQuotas
from pensieve.server.sessions.sessions import Sessions
from pensieve.server.sessions.subjects import Subjects
from pensieve.server.sessions.warming import SessionWarmer
from pensieve.server.settings import TurnSettings
from pensieve.server.turns.runner import TurnRunner
from pensieve.server.turns.turns import Turns
from pensieve.server.values import InputEntry, TurnEnd
from pensieve.store import HistoryStore, Key
from pensieve.store.records import History
from pensieve.tokenizer import ChatTokenizer

STORE_TIMEOUT_S: Final = 2.0
"""Timeout for the store when an operator asks for its state."""
MAX_COUNTED_CONTEXTS: Final = 4
"""Inputs are counted up to this many times the context limit, to tell callers by how much they exceed it."""


@dataclass(frozen=True, slots=True)
class ContextSize:
    """A counted context: the answer to CountTokens."""

    input_tokens: int
    context_tokens: int
    context_limit: int


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts about the server: the answer to GetServerInfo."""

    version: str
    replica: str
    model: str
    model_sha256: str
    tokenizer_sha256: str
    template_sha256: str
    vocab_size: int
    context_limit: int
    features: tuple[str, ...]


def _ignore(*_: object) -> None:
    return


@dataclass(frozen=True, slots=True)
class ServiceListeners:
    """Callbacks for events in the service."""

    turn_ended: Callable[[TurnEnd], None] = _ignore
    """Called in the turn's task, also for a failed turn. See ``Turns``."""
    turn_refused: Callable[[str, str], None] = _ignore
    warmed: Callable[[str], None] = _ignore
    """Called with the outcome; see ``SessionWarmer``."""
    compacted: Callable[[str], None] = _ignore
    """Called with the outcome of a compaction by policy; see ``IdleCompaction``."""
    store_regression: Callable[[str], None] = _ignore
    """Called with the side that noticed it; see ``KnownRevisions``."""


class Conversations:
    """Owns all turns of this process. ``close`` discards those still running."""

    def __init__(
        self,
        store: HistoryStore,
        link: EngineLink,
        tokenizer: ChatTokenizer,
        settings: TurnSettings,
        listeners: ServiceListeners | None = None,
        tenants: TenantTable | None = None,
    ) -> None:
        """``store`` is open; ``link`` may still be starting."""
        self.settings = settings
        self.store = store
        self.link = link
        self._tokenizer = tokenizer
        self._renderer = renderer = Renderer(tokenizer)
        tenants = tenants or TenantTable()
        listeners = listeners or ServiceListeners()
        self._transcript = transcript = Transcript(
            store, renderer, settings.history_cache_bytes, listeners.store_regression
        )
        self._checker = GrammarChecker()
        self._served = served = ServedModel(settings.model, settings.model_sha256, tokenizer)
        self._runner = runner = TurnRunner(transcript, link, served, settings, self._checker)
        self.gate = AdmissionGate(
            GateLimits(settings.max_wait_s, settings.max_queued, settings.max_queued_tokens),
            tenants,
            lambda: link.stats,
            time.monotonic,
        )
        self.usage = UsageTracker(store, lambda: link.stats.held or {}, lambda: tenants.tenant_names)

        def on_turn_ended(end: TurnEnd) -> None:
            self.usage.turn_ended(end)
            listeners.turn_ended(end)
            self._idle_compaction.turn_ended(end)

        def on_turn_refused(tenant: str, reason: str) -> None:
            self.usage.turn_refused(tenant)
            listeners.turn_refused(tenant, reason)

        self.turns = Turns(store, runner, settings, self.gate, on_turn_ended, on_turn_refused)
        self.find_turn = functools.partial(find_turn, store)
        self.quotas = StorageQuotas(store, tenants)
        self.claims = RequestClaims(store, self.quotas)
        self.sessions = Sessions(transcript, link, self.turns, served, settings, self.quotas)
        self.subjects = Subjects(store, self.sessions, self.residency)
        self.warmer = SessionWarmer(transcript, link, self.turns, served, settings, listeners.warmed)
        self.compactor = Compactor(transcript, self.sessions, self.turns, self.warmer)
        self._idle_compaction = IdleCompaction(self.compactor, listeners.compacted)

    @property
    def context_limit(self) -> int:
        """Exclusive limit on a context's tokens. Raises Unavailable (STARTING) before the engine is up."""
        return context_limit(self.link.info)

    @property
    def vocab_size(self) -> int:
        """Exclusive limit on clients' token ids. Raises Unavailable (STARTING)."""
        return min(self.link.info.vocab_size, self._tokenizer.vocab_size)

    async def count_tokens(self, tenant: str, key: Key | None, entries: Sequence[InputEntry]) -> ContextSize:
        """Count the context that a turn with this input would start from, its generation prompt included.

        ``key`` None: without a history. Raises ContextLimitExceeded, without counting, for an input that must exceed
        ``MAX_COUNTED_CONTEXTS`` times the limit.
        """
        self._renderer.check_size(entries, MAX_COUNTED_CONTEXTS * self.context_limit)
        history = History()
        if key is not None:
            _, history = await self._transcript.read(key)
        limit = self.context_limit
        past = self._renderer.length(history)
        self._served.check(history.config)
        if not entries:
            return ContextSize(0, past, limit)
        items, prompt = await self._renderer.for_tenant(tenant).items(
            history,
            entries,
            ItemStamp(history.head_item + 1, "", 0),
            generation_prompt=True,
        )
        new = sum(packed_length(item.tokens) for item in items) + len(prompt)
        return ContextSize(new, past + new, limit)

    async def residency(self, key: Key) -> ResidentTokens | None:
        """Return the session's KV-tokens by tier, or None if no engine can answer."""
        try:
            return await self.link.residency(ids.session_key(key))
        except PensieveError:
            return None

    async def facts(self) -> ServerFacts:
        """Return facts about the server. Raises Unavailable (STARTING) before the engine is up."""
        info = self.link.info
        return ServerFacts(
            version=pensieve.__version__,
            replica=self.settings.replica,
            model=self.settings.model,
            model_sha256=self.settings.model_sha256,
            tokenizer_sha256=self._tokenizer.sha256,
            template_sha256=self._tokenizer.template_sha256,
            vocab_size=self.vocab_size,
            context_limit=self.context_limit,
            features=(
                f"durability={self.store.durability}",
                f"device={info.device}",
                f"dtype={info.dtype}",
                f"numerics={info.numerics}",
                f"weights={info.weights or info.dtype}",
                f"kv={info.kv or info.dtype}",
                f"chunk_tokens={info.chunk_tokens}",
                f"device_tokens={info.device_capacity_tokens}",
                f"host_tokens={info.host_capacity_tokens}",
                f"prefix_sharing={'on' if self.settings.prefix_sharing else 'off'}",
                f"calls={self._tokenizer.call_form or 'none'}",
                f"thinks={self._tokenizer.thinks or 'none'}",
            ),
        )

    # ---- operators

    async def store_state(self) -> str:
        """Return ``serving``, or the reason why the store does not."""
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                await self.store.ping()
        except TimeoutError:
            return "does not answer"
        except PensieveError as error:
            return error.reason
        return "serving"

    async def evict(self, key: Key | None) -> int:
        """Evict cached state of one session, or of all idle ones. Return the number of tokens. History stays."""
        return await self.link.evict(None if key is None else ids.session_key(key))

    async def drain(self, deadline_s: float) -> int:
        return await self.turns.drain(deadline_s)

    async def close(self) -> None:
        await self.turns.drain(0.0)
        await self._idle_compaction.close()
        await self._runner.close()
        await self._checker.close()
        self._renderer.close()
