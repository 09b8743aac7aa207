"""The work of a turn, from the store's lease to the committed record.

    begin in the store -> read history -> render the new turn -> submit to the engine -> tokens -> commit

Each step is one method, and takes the ``TurnRun`` that it works for. A step that fails raises: the lease is then
released and the turn has left no trace.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import msgspec
import numpy as np

from pensieve.core import Phase, Role
from pensieve.debug import async_failpoint
from pensieve.errors import DataLoss, NotFound, TurnFenced, Unavailable
from pensieve.server import ids
from pensieve.server.admission import text_length
from pensieve.server.clock import now_ms
from pensieve.server.history.binding import ServedModel
from pensieve.server.history.cache import Histories, kept, system_item
from pensieve.server.history.framing import framed
from pensieve.server.history.rendering import PreparedTurn, Renderer, Room, Stamp
from pensieve.server.links.engine_link import EngineLink, context_limit
from pensieve.server.settings import TurnSettings
from pensieve.server.turns import candidates, sampling
from pensieve.server.turns import record as turn_record
from pensieve.server.turns.following import committed_elsewhere, follow, hear
from pensieve.server.turns.hints import take as take_hints
from pensieve.server.turns.lease import LeaseKeeper, LeaseReleaser
from pensieve.server.turns.record import CommittedTurn
from pensieve.server.turns.run import Order, TurnRun
from pensieve.server.turns.text import OutputText
from pensieve.server.values import InputEntry, ProgressView, TurnView
from pensieve.store import (
    Began,
    BeginRequest,
    Counts,
    HistoryStore,
    Key,
    Replay,
    head_hash_after,
)
from pensieve.store.records import CandidateChoice, History, Record, SessionRow
from pensieve.tokenizer import ChatTokenizer

log = logging.getLogger(__name__)


class TurnRunner:
    """See the module docstring. Keeps nothing of a turn but its lease: one runner serves all of them at once."""

    def __init__(
        self,
        store: HistoryStore,
        link: EngineLink,
        histories: Histories,
        renderer: Renderer,
        tokenizer: ChatTokenizer,
        served: ServedModel,
        settings: TurnSettings,
    ) -> None:
        self._store = store
        self._leases = LeaseKeeper(store, settings.lease_s)
        self._link = link
        self._histories = histories
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._served = served
        self._settings = settings
        self._releaser = LeaseReleaser(store, settings.lease_s)

    async def close(self) -> None:
        """When no turn runs any more."""
        await self._releaser.close()

    async def play(self, run: TurnRun) -> TurnView:
        """The whole turn, or its replay when it was committed before. Raises what it is discarded with."""
        if run.committed_at is not None:
            return await self._replay(run, run.committed_at)
        if run.onlooker:
            return await self._replay(run, await committed_elsewhere(self._store, run))
        await async_failpoint("before_begin")
        seed = sampling.explicit_seed(run.spec.sampling)
        known = self._histories.known.of(run.key)
        request = BeginRequest(
            request_id=run.spec.request_id,
            fingerprint=run.fingerprint,
            token=run.lease_token,
            owner=self._settings.replica,
            attempt=run.attempt,
            lease_ms=round(self._settings.lease_s * 1000),
            seed=ids.seed_of(run.key, run.spec.request_id) if seed is None else seed,
            expected_revision=run.spec.expected_revision,
            start_ms=now_ms(),
            known_revision=known.revision,
            known_head=known.head_hash,
            known_create_ms=known.create_ms,
        )
        try:
            outcome = await self._store.begin(run.key, request)
            if not isinstance(outcome, Began | Replay):
                outcome = await follow(self._store, run, request)
        except DataLoss as error:
            if error.reason == "HISTORY_REGRESSED":
                self._histories.known.found(run.key, error.metadata.get("current_revision", ""), known)
            raise
        except Unavailable:
            await self._abort(run)  # the reply may be lost, not the request
            raise
        if isinstance(outcome, Replay):
            return await self._replay(run, outcome.revision)
        return await self._hold_lease(run, outcome)

    async def committed_turn(self, key: Key, revision: int) -> CommittedTurn | None:
        """The turn with this revision, verified, and what became of it; None when it is not a turn's."""
        return await turn_record.committed(self._store, key, revision)

    # ---- from begin to end

    async def _hold_lease(self, run: TurnRun, began: Began) -> TurnView:
        run.began = True

        def lost() -> None:
            run.end_early(Order(error=TurnFenced("the turn lost its lease")))

        keeping = self._leases.keeping(
            run.key, run.lease_token, on_lost=lost, on_news=lambda news: hear(run, news)
        )
        with keeping:
            try:
                _check_known(run, began)
                await async_failpoint("after_begin")
                return await self._generate(run, began)
            except BaseException:
                # Whatever it was, a cancelled task included: the session is free at once, not when the lease lapses.
                await self._abort(run)
                raise

    async def _abort(self, run: TurnRun) -> None:
        await self._releaser.release(run.key, run.lease_token, called_off=run.called_off)

    async def _generate(self, run: TurnRun, began: Began) -> TurnView:
        spec, defaults = run.spec, self._settings.defaults
        base = await self._histories.at(run.key, began.row)
        config = base.config
        self._served.check(config)
        # A retry has the seed of the attempt before it, whether the turn or its session names one or not.
        seed = sampling.explicit_seed(spec.sampling, config.sampling, defaults)
        run.seed = began.seed if seed is None else seed
        run.base_revision = base.revision
        layers = (spec.sampling, config.sampling, defaults)
        values = sampling.resolve(*layers, seed=run.seed, top_logprobs=spec.output.top_logprobs)
        # What an edit or a regeneration supersedes is cut off only for rendering. The record says it, and is built on
        # ``base`` as stored: the old answer stays in history unless the new one is committed.
        keep = _keep_items(run, base)
        room = Room(context_limit(self._link.info), config.overflow, values.max_output_tokens)
        shown_base = base if keep is None else kept(base, keep)
        stamp = Stamp(base.head_item + 1, spec.request_id, now_ms())
        prepared = await self._renderer.of(run.key.tenant).prepare(shown_base, spec.input, stamp, room)
        other = await self._framed(run, shown_base)
        if other is not None:
            # History gets the items as the session renders them. The model sees this turn's frame before them.
            stamp = Stamp(other.head_item + 1, spec.request_id, now_ms())
            shown = await self._renderer.of(run.key.tenant).prepare(other, spec.input, stamp, room)
            prepared = replace(prepared, context=shown.context, num_new=shown.num_new)
            config = other.config
        self._served.check_tokens(prepared.context, self._link.info.vocab_size)
        values = sampling.with_calls(values, spec.calls, config, self._tokenizer)
        self._served.check_tokens(np.array(values.opening, dtype=np.int32), self._link.info.vocab_size)
        run.new_tokens = prepared.num_new
        if run.ticket is not None:
            chars = 0 if any(entry.tokens is not None for entry in spec.input) else text_length(spec)
            history = len(prepared.context) - prepared.num_fresh
            run.ticket.rendered(chars, prepared.num_new, prepared.num_fresh, history)
        outputs = [
            OutputText(
                self._tokenizer,
                values.stop,
                sampling.free_from(values),
                # Behind verbatim tokens there is no generation prompt, and an answer is text like any other.
                thinks=len(prepared.prompt) > 0,
                one_call=spec.calls.one and bool(config.tools),
            )
            for _ in range(values.candidates)
        ]
        run.accept(len(prepared.context), *outputs, replayed=False)
        hints, run.hints = take_hints(spec.hints, self._link.info)
        await run.generation.run(
            self._link,
            ids.session_key(run.key),
            prepared,
            values,
            spec.max_duration_s,
            scope=self._settings.sharing_scope(run.key, config),
            hints=hints,
            origin=f"{ids.session_key(run.key)}/{spec.request_id}",
            standing=run.standing,
            ticket=run.ticket,
        )
        return await self._finish(run, base, keep, prepared, sampling.choice(*layers))

    async def _framed(self, run: TurnRun, base: History) -> History | None:
        """``base`` as it would be with the turn's own system prompt and tools; None where the turn has none."""
        frame, config = run.spec.frame, base.config
        wanted = msgspec.structs.replace(
            config,
            system_prompt=config.system_prompt if frame.system_prompt is None else frame.system_prompt,
            tools=config.tools if frame.tools is None else frame.tools,
        )
        if wanted == config:
            return None
        prompt = InputEntry(Role.SYSTEM, wanted.system_prompt + wanted.tools)
        self._renderer.check_size((prompt,), context_limit(self._link.info))
        return await framed(self._renderer.of(run.key.tenant), base, wanted, now_ms())

    # ---- the end

    async def _finish(
        self,
        run: TurnRun,
        base: History,
        keep: int | None,
        prepared: PreparedTurn,
        choice: CandidateChoice,
    ) -> TurnView:
        order = run.begin_commit()
        if order is None:
            answer = candidates.all_kept(run.buffer.outputs, run.generation, choice, run.seed)
        else:
            answer = candidates.partly_kept(run.buffer.outputs, run.generation, order.keep_tokens)
        answer = replace(answer, hints=run.hints)
        run.buffer.report(ProgressView(Phase.COMMIT))
        record = turn_record.build(
            run.spec,
            base,
            prepared,
            answer,
            keep_items=keep,
            seed=run.seed,
            attempt=run.attempt,
            time_ms=now_ms(),
            config=self._served.bound(base.config) if base.config.binding is None else None,
        )
        # The store writes the session's row together with the record, so what the row says is counted before.
        after = base.apply(record, "")
        counts = Counts(after.head_item, len(after.items), self._renderer.length(after))
        await async_failpoint("before_commit")
        row = await self._commit(run, record, counts)
        await async_failpoint("after_commit_before_ack")
        await self._check_is_ours(run, base, record, row)
        self._histories.committed(run.key, base, record, row)
        if answer.chosen:
            self._link.choose(ids.session_key(run.key), answer.chosen)
        turn = CommittedTurn(record, change=None, head=record.revision, latest=True)
        return turn_record.committed_view(run.key, turn)

    async def _commit(self, run: TurnRun, record: Record, counts: Counts) -> SessionRow:
        """Append the record, waiting for a store that is down. Raises Unavailable: the outcome is then unknown."""
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + self._settings.commit_retry_s, 0.05
        while True:
            try:
                return await self._store.commit(run.key, run.lease_token, run.fingerprint, record, counts)
            except Unavailable:
                if loop.time() + pause > until:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)

    async def _check_is_ours(self, run: TurnRun, base: History, record: Record, row: SessionRow) -> None:
        """The store answers a repeated commit of a request id like the first one, whoever made that.

        Raises TurnFenced when another replica had taken this turn over and committed it: its answer is in history.
        """
        if row.head_hash == head_hash_after(record, base.head_hash):
            return
        # The chain went on after a commit of ours whose reply was lost, or it was never ours: the record tells.
        revision = await self._store.find_request(run.key, run.spec.request_id)
        stored = None if revision is None else await self.committed_turn(run.key, revision)
        stored_turn = None if stored is None else stored.record.turn
        if stored_turn is None or stored_turn.attempt != run.attempt:
            raise TurnFenced("another replica took the turn over and committed it")

    async def _replay(self, run: TurnRun, revision: int) -> TurnView:
        """The turn was committed before: fill the buffer from the store."""
        turn = await self.committed_turn(run.key, revision)
        if turn is None or turn.record.turn is None:
            raise NotFound("the request id belongs to another kind of change", reason="TURN_NOT_FOUND")
        view = turn_record.committed_view(run.key, turn)
        result = turn.record.turn
        run.seed, run.base_revision, run.attempt = view.seed, view.base_revision, result.attempt
        outputs = candidates.replayed(view, self._tokenizer)
        run.accept(result.usage.context_tokens, *outputs, replayed=True)
        return view


def _check_known(run: TurnRun, began: Began) -> None:
    """Raises DataLoss when the client has seen a newer revision than the store has. Others may be ahead of a client."""
    known, current = run.spec.known_revision, began.row.revision
    if known is None or known <= current:
        return
    log.warning(
        "a client has seen a newer revision than the store has",
        extra={"session": run.key.session_id, "known_revision": known, "current_revision": current},
    )
    raise DataLoss(
        f"the store holds revision {current}, the caller has seen {known}: history went back in time",
        reason="HISTORY_REGRESSED",
        metadata={"current_revision": str(current)},
    )


def _keep_items(run: TurnRun, base: History) -> int | None:
    """The last item that stays; None: all do. Raises NotFound for a number that no live item has."""
    after = run.spec.replace_after_item
    if after is None:
        return None
    if after and all(item.number != after for item in base.items):
        raise NotFound("no such item in the session's live history", reason="ITEM_NOT_FOUND")
    return max(after, system_item(base))
