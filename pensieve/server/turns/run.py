"""One generation attempt of one turn: from the store's lease to the committed record.

    begin in the store -> read history -> render the new turn -> submit to the engine -> tokens -> commit

The run belongs to ``Turns``, not to a call: callers attach and leave. It ends in exactly one of two ways, both final
before any caller hears of them: committed, or discarded without a trace in the history. Whoever wants it to end early
gives it an ``Order``; an order that comes once the commit has begun is too late.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from pensieve.core import FinishReason, Phase
from pensieve.debug import async_failpoint
from pensieve.errors import NotFound, PensieveError, TurnFenced, Unavailable
from pensieve.server import ids
from pensieve.server.bugs import bug
from pensieve.server.history.cache import Histories, kept, system_item
from pensieve.server.history.rendering import PreparedTurn, Renderer, Room, Stamp
from pensieve.server.links.engine_link import EngineLink
from pensieve.server.settings import TurnSettings
from pensieve.server.turns import record as turn_record
from pensieve.server.turns import sampling
from pensieve.server.turns.buffer import TurnBuffer
from pensieve.server.turns.generation import TurnGeneration
from pensieve.server.turns.lease import LeaseKeeper
from pensieve.server.turns.text import OutputText, replayed_text
from pensieve.server.values import Accepted, NewTurn, ProgressView, TurnStatus, TurnView
from pensieve.store import (
    Began,
    BeginRequest,
    Counts,
    HistoryStore,
    Key,
    Replay,
    RunningElsewhere,
    head_hash_after,
)
from pensieve.store.records import History, Record, SessionRow
from pensieve.tokenizer import ChatTokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TurnTools:
    """What every run works with."""

    store: HistoryStore
    link: EngineLink
    tokenizer: ChatTokenizer
    renderer: Renderer
    histories: Histories
    settings: TurnSettings
    context_limit: Callable[[], int]
    """Raises Unavailable before the engine has said what it is."""


@dataclass(frozen=True, slots=True)
class Order:
    """End the turn early: commit what there is (the first ``keep_tokens``), or discard it with ``error``."""

    keep_tokens: int | None = None
    error: PensieveError | None = None


class TurnRun:
    """See the module docstring. ``start`` once; the result is in ``buffer``."""

    def __init__(
        self,
        tools: TurnTools,
        key: Key,
        spec: NewTurn,
        fingerprint: str,
        retire: Callable[[TurnRun, TurnView | PensieveError], None],
        committed_at: int | None = None,
    ) -> None:
        """``retire`` is called once, right before the outcome is told. ``committed_at``: only replay that revision."""
        self.key = key
        self.spec = spec
        self.fingerprint = fingerprint
        self.attempt = ids.new_attempt()
        self.buffer = TurnBuffer()
        self.seed = 0
        self.base_revision = 0
        self.began = False
        """Whether it holds or held the lease: a turn of its own, not the replay of an older one."""
        self.arrived_at = 0.0
        """On the event loop's clock."""
        self.new_tokens = 0
        """Input of this turn, known once it is rendered."""
        self.generation = TurnGeneration(self.buffer)
        self._tools = tools
        self._retire = retire
        self._committed_at = committed_at
        self._token = ids.new_token()
        self._order: Order | None = None
        self._committing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Run as a task of its own."""
        self.arrived_at = asyncio.get_running_loop().time()
        self._task = asyncio.create_task(self._run(), name=f"turn {self.attempt}")

    def end_early(self, order: Order) -> bool:
        """End early. The first order counts; False when it is too late for any."""
        if self._committing or self.buffer.ended:
            return False
        if self._order is None:
            self._order = order
            self.generation.interrupt()
        return True

    @property
    def view(self) -> TurnView:
        """The turn while it runs."""
        return TurnView(
            session_id=self.key.session_id,
            request_id=self.spec.request_id,
            state=TurnStatus.RUNNING,
            base_revision=self.base_revision,
            seed=self.seed,
        )

    # ---- from begin to end

    async def _run(self) -> None:
        outcome: TurnView | PensieveError = Unavailable("the server is stopping", reason="DRAINING")
        try:
            if self._committed_at is not None:
                outcome = await self._replay(self._committed_at)
            else:
                outcome = await self._begin()
        except PensieveError as error:
            outcome = error
        except Exception as error:
            outcome = bug(error, "a turn")
        finally:
            # Out of the registry first: who hears the outcome and tries again must not meet this run.
            self._retire(self, outcome)
            self.buffer.end(outcome)

    async def _begin(self) -> TurnView:
        settings, store = self._tools.settings, self._tools.store
        await async_failpoint("before_begin")
        seed = sampling.explicit_seed(self.spec.sampling)
        request = BeginRequest(
            request_id=self.spec.request_id,
            fingerprint=self.fingerprint,
            token=self._token,
            owner=settings.replica,
            attempt=self.attempt,
            lease_ms=round(settings.lease_s * 1000),
            seed=ids.new_seed() if seed is None else seed,
            expected_revision=self.spec.expected_revision,
            start_ms=_now_ms(),
        )
        try:
            outcome = await store.begin(self.key, request)
        except Unavailable:
            await self._abort()  # the reply may be lost, not the request
            raise
        match outcome:
            case Replay():
                return await self._replay(outcome.revision)
            case RunningElsewhere():
                raise running_elsewhere()
            case Began():
                return await self._hold_lease(outcome)

    async def _hold_lease(self, began: Began) -> TurnView:
        self.began = True
        lease = LeaseKeeper(
            self._tools.store, self.key, self._token, self._tools.settings.lease_s, self._lease_lost
        )
        try:
            await async_failpoint("after_begin")
            return await self._play(began)
        except BaseException:
            await self._abort()
            raise
        finally:
            await lease.stop()

    def _lease_lost(self) -> None:
        self.end_early(Order(error=TurnFenced("the turn lost its lease")))

    async def _abort(self) -> None:
        try:
            await self._tools.store.abort(self.key, self._token)
        except PensieveError as error:
            log.warning("lease not released (%s): it lapses by itself", error.reason)

    async def _play(self, began: Began) -> TurnView:
        base = await self._tools.histories.at(self.key, began.row)
        config, defaults = base.config, self._tools.settings.defaults
        seed = sampling.explicit_seed(self.spec.sampling, config.sampling, defaults)
        self.seed = began.seed if seed is None else seed
        self.base_revision = base.revision
        values = sampling.resolve(
            self.spec.sampling,
            config.sampling,
            defaults,
            seed=self.seed,
            top_logprobs=self.spec.output.top_logprobs,
        )
        keep = self._keep_items(base)
        prepared = await self._tools.renderer.prepare(
            base if keep is None else kept(base, keep),
            self.spec.input,
            Stamp(base.head_item + 1, self.spec.request_id, _now_ms()),
            Room(self._tools.context_limit(), config.overflow, values.max_output_tokens),
        )
        self.new_tokens = prepared.num_new
        output = OutputText(self._tools.tokenizer, values.stop, values.min_output_tokens)
        self._accept(len(prepared.context), output, replayed=False)
        await self.generation.run(
            self._tools.link, ids.session_key(self.key), prepared, values, self.spec.max_duration_s
        )
        return await self._finish(base, keep, prepared, output)

    def _keep_items(self, base: History) -> int | None:
        """The last item that stays; None: all do. Raises NotFound for a number that no live item has."""
        after = self.spec.replace_after_item
        if after is None:
            return None
        if after and all(item.number != after for item in base.items):
            raise NotFound("no such item in the session's live history", reason="ITEM_NOT_FOUND")
        return max(after, system_item(base))

    def _accept(self, context_tokens: int, output: OutputText, *, replayed: bool) -> None:
        accepted = Accepted(
            request_id=self.spec.request_id,
            base_revision=self.base_revision,
            context_tokens=context_tokens,
            seed=self.seed,
            attempt=self.attempt,
            replayed=replayed,
        )
        self.buffer.accept(accepted, output)

    # ---- the end

    async def _finish(
        self, base: History, keep: int | None, prepared: PreparedTurn, output: OutputText
    ) -> TurnView:
        order = self._order
        if order is not None and order.error is not None:
            raise order.error
        self._committing = True
        text = output.finish(order.keep_tokens if order is not None else None)
        self.buffer.report(ProgressView(Phase.COMMIT))
        answer = turn_record.KeptAnswer(
            tokens=tuple(output.tokens),
            text=text,
            finish_reason=FinishReason.CANCELLED if order is not None else self.generation.finish_reason,
            stop_sequence=output.stop or "",
            usage=self.generation.usage(len(output.tokens)),
        )
        record = turn_record.build(
            self.spec,
            base,
            prepared,
            answer,
            keep_items=keep,
            seed=self.seed,
            attempt=self.attempt,
            time_ms=_now_ms(),
        )
        after = base.apply(record, "")
        counts = Counts(after.head_item, len(after.items), self._tools.renderer.length(after))
        await async_failpoint("before_commit")
        row = await self._commit(record, counts)
        await async_failpoint("after_commit_before_ack")
        await self._check_is_ours(base, record, row)
        self._tools.histories.committed(self.key, base, record, row)
        return turn_record.committed_view(self.key, record)

    async def _commit(self, record: Record, counts: Counts) -> SessionRow:
        """Append the record, waiting for a store that is down. Raises Unavailable: the outcome is then unknown."""
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + self._tools.settings.commit_retry_s, 0.05
        while True:
            try:
                return await self._tools.store.commit(self.key, self._token, self.fingerprint, record, counts)
            except Unavailable:
                if loop.time() + pause > until:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)

    async def _check_is_ours(self, base: History, record: Record, row: SessionRow) -> None:
        """The store answers a repeated commit of a request id like the first one, whoever made that.

        Raises TurnFenced when another replica had taken this turn over and committed it: its answer is in history.
        """
        if row.head_hash == head_hash_after(record, base.head_hash):
            return
        revision = await self._tools.store.find_request(self.key, self.spec.request_id)
        stored = None if revision is None else await committed_turn(self._tools.store, self.key, revision)
        if stored is None or stored.turn is None or stored.turn.attempt != self.attempt:
            raise TurnFenced("another replica took the turn over and committed it")

    async def _replay(self, revision: int) -> TurnView:
        """The turn was committed before: fill the buffer from the store."""
        record = await committed_turn(self._tools.store, self.key, revision)
        if record is None or record.turn is None:
            raise NotFound("the request id belongs to another kind of change", reason="TURN_NOT_FOUND")
        view = turn_record.committed_view(self.key, record)
        assert view.output is not None
        self.seed, self.base_revision, self.attempt = view.seed, view.base_revision, record.turn.attempt
        tokens = turn_record.output_tokens(view.output).tolist()
        output = replayed_text(self._tools.tokenizer, tokens, view.output.text)
        output.cut_short = view.finish_reason is FinishReason.CANCELLED
        self._accept(record.turn.usage.context_tokens, output, replayed=True)
        return view


def running_elsewhere() -> Unavailable:
    return Unavailable(
        "the turn is running on another replica", reason="TURN_RUNNING_ELSEWHERE", retry_after_s=1.0
    )


async def committed_turn(store: HistoryStore, key: Key, revision: int) -> Record | None:
    """The record with this revision, verified; None when it is not a turn's."""
    records = await store.read(key, after_revision=revision - 1)
    found = next((logged.record for logged in records if logged.record.revision == revision), None)
    return found if found is not None and found.turn is not None else None


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
