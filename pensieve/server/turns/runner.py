"""The work of a turn, from the store's lease to the committed record.

    begin in the store -> read history -> render the new turn -> submit to the engine -> tokens -> commit

A step that fails raises; the lease is then released and the turn leaves no trace.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec

from pensieve.core import CandidateChoice, Phase, Role, pack_tokens
from pensieve.debug import async_failpoint
from pensieve.engine.messages import Submit
from pensieve.errors import (
    DataLoss,
    NotFound,
    PensieveError,
    ResourceExhausted,
    TurnFenced,
    Unavailable,
)
from pensieve.server import ids
from pensieve.server.admission import text_length
from pensieve.server.clock import now_ms
from pensieve.server.grammars.checker import GrammarChecker
from pensieve.server.history.binding import ServedModel
from pensieve.server.history.cuts import system_item, truncated_to
from pensieve.server.history.rendering import ContextRoom, ItemStamp, PreparedTurn, with_frame
from pensieve.server.history.transcript import Transcript
from pensieve.server.links.engine_link import EngineLink, context_limit
from pensieve.server.settings import TurnSettings
from pensieve.server.turns import record as turn_record
from pensieve.server.turns import sampling
from pensieve.server.turns.buffer import TurnBuffer
from pensieve.server.turns.generation import clip_hints
from pensieve.server.turns.lease import (
    LeaseKeeper,
    LeaseReleaser,
    apply_renewal,
    follow_remote_turn,
    wait_for_remote_commit,
)
from pensieve.server.turns.record import CommittedTurn
from pensieve.server.turns.run import Order, RunState, TurnRun
from pensieve.server.turns.shape import answer_shape, opening, with_grammar
from pensieve.server.turns.text import OutputText
from pensieve.server.values import Accepted, InputEntry, ProgressView, TurnFrame, TurnView
from pensieve.speech import FirstCall
from pensieve.store import Began, BeginRequest, Counts, Key, Replay
from pensieve.store.records import History, Record, SessionConfig, SessionRow

MOST_LOST: Final = 256
"""Turns whose lost output is kept for another attempt. Some callers never make one."""
_TRIED_AGAIN: Final = (Unavailable, ResourceExhausted, TurnFenced)
"""Errors of an attempt after which callers make another. Not ``Internal``: drafts may have made the engine fail."""


class LostOutputs:
    """Output that was lost with an engine, or not committed. The next attempt at its turn starts from the same seed,
    and gets the tokens as drafts."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[Key, str], Sequence[int]] = {}
        """By session and request id; the oldest first."""

    def tokens(self, run: TurnRun) -> Sequence[int]:
        return self._tokens.get((run.key, run.spec.request_id), ())

    def on_attempt_ended(self, run: TurnRun, outcome: TurnView | PensieveError) -> None:
        """Keep the tokens of an attempt that another may follow. Forget those of a turn that has ended."""
        turn = run.key, run.spec.request_id
        before = self._tokens.pop(turn, ())
        tokens = run.buffer.outputs[0].tokens if run.buffer.outputs else ()
        if (before or tokens) and isinstance(outcome, _TRIED_AGAIN) and not run.cancelled_by_caller:
            # An attempt that came before the next engine was ready has fewer than the one before it, or none.
            self._tokens[turn] = max(before, tuple(tokens), key=len)
            if len(self._tokens) > MOST_LOST:
                del self._tokens[next(iter(self._tokens))]

    def forget(self, key: Key, request_id: str | None = None) -> None:
        """Forget the tokens of a cancelled turn, which may be between two attempts. None: of all turns of a session,
        which is deleted."""
        for turn in [one for one in self._tokens if one[0] == key and request_id in (None, one[1])]:
            del self._tokens[turn]


class TurnRunner:
    """Does the work of all turns. It holds a turn's lease from its begin to its end."""

    def __init__(
        self,
        transcript: Transcript,
        link: EngineLink,
        served: ServedModel,
        settings: TurnSettings,
        checker: GrammarChecker,
    ) -> None:
        self._transcript = transcript
        self._store = transcript.store
        self._renderer = transcript.renderer
        self._link = link
        self._served = served
        self._settings = settings
        self._checker = checker
        self.lost = LostOutputs()
        self._leases = LeaseKeeper(self._store, settings.lease_s)
        self._releaser = LeaseReleaser(self._store, settings.lease_s)

    async def close(self) -> None:
        """Call when no turn runs any more."""
        await self._releaser.close()

    async def play(self, run: TurnRun) -> TurnView:
        """Run the whole turn, or replay it if it was committed before. Raises the error that discards it."""
        await async_failpoint("before_begin")
        seed = sampling.explicit_seed(run.spec.sampling)
        known = self._transcript.known.get(run.key)
        client_is_ahead = (run.spec.known_revision or 0) > known.revision
        request = BeginRequest(
            request_id=run.spec.request_id,
            fingerprint=run.fingerprint,
            token=run.lease_token,
            owner=self._settings.replica,
            attempt=run.attempt,
            lease_ms=round(self._settings.lease_s * 1000),
            seed=ids.turn_seed(run.key, run.spec.request_id) if seed is None else seed,
            expected_revision=run.spec.expected_revision,
            start_ms=now_ms(),
            known_revision=max(known.revision, run.spec.known_revision or 0),
            known_head="" if client_is_ahead else known.head_hash,
            known_create_ms=0 if client_is_ahead else known.create_ms,
        )
        try:
            outcome = await self._store.begin(run.key, request)
            if not isinstance(outcome, Began | Replay):
                outcome = await follow_remote_turn(self._store, run, request)
        except DataLoss as error:
            if error.reason == "HISTORY_REGRESSED":
                self._transcript.known.record_regression(
                    run.key, error.metadata.get("current_revision", ""), known
                )
            raise
        except Unavailable:
            await self._abort(run)  # the store may have taken the request and lost the reply
            raise
        if isinstance(outcome, Replay):
            run.on_in_history()
            return await self._replay(run.buffer, run.key, run.spec.request_id, outcome.revision)
        run.on_begun()
        return await self._hold_lease(run, outcome)

    async def replay(self, key: Key, request_id: str, revision: int | None, buffer: TurnBuffer) -> TurnView:
        """Fill the buffer with a committed turn; ``revision`` None: wait for another server to commit it.
        Raises NotFound (TURN_NOT_FOUND) when the turn ends without a commit."""
        if revision is None:
            revision = await wait_for_remote_commit(self._store, key, request_id)
        return await self._replay(buffer, key, request_id, revision)

    # ---- from begin to end

    async def _hold_lease(self, run: TurnRun, began: Began) -> TurnView:
        def lost() -> None:
            run.end_early(Order(error=TurnFenced("the turn lost its lease")))

        keeping = self._leases.renewing(
            run.key, run.lease_token, on_lost=lost, on_renewed=lambda news: apply_renewal(run, news)
        )
        with keeping:
            try:
                await async_failpoint("after_begin")
                return await self._generate(run, began)
            except BaseException:
                # Also for a cancelled task: free the session now, not when the lease expires.
                await self._abort(run)
                raise

    async def _abort(self, run: TurnRun) -> None:
        await self._releaser.release(run.key, run.lease_token, cancelled=run.cancelled_by_caller)

    async def _generate(self, run: TurnRun, began: Began) -> TurnView:
        spec = run.spec
        base = await self._transcript.history_at(run.key, began.row)
        self._served.check(base.config)
        layers = (spec.sampling, base.config.sampling, self._settings.defaults)
        # A retry keeps the seed of the attempt before it, whether or not the turn or its session sets one.
        seed = sampling.explicit_seed(*layers)
        run.set_base(base, began.seed if seed is None else seed)
        values = sampling.resolve(*layers, seed=run.seed, top_logprobs=spec.output.top_logprobs)
        keep = _keep_items(run, base)
        prepared, config = await self._render(run, base, keep, values.max_output_tokens)
        self._served.check_tokens(prepared.context, self._link.info.vocab_size)
        tokenizer, tenant = self._renderer.tokenizer, run.key.tenant
        shape = answer_shape(spec, config.tools, tokenizer, is_prompted=len(prepared.prompt) > 0)
        if shape is not None:
            values = await with_grammar(values, shape, tokenizer, self._checker, tenant)
        if run.ticket is not None:
            chars = 0 if any(entry.tokens is not None for entry in spec.input) else text_length(spec)
            history = len(prepared.context) - prepared.num_fresh
            run.ticket.on_rendered(chars, prepared.num_new, prepared.num_fresh, history)
        speech = replace(tokenizer.speech, tagged=spec.format is not None)
        outputs = [
            OutputText(
                tokenizer,
                values.stop,
                values.min_output_tokens,
                # Verbatim tokens have no generation prompt after them: the answer is plain text, without
                # thoughts.
                thinks=len(prepared.prompt) > 0,
                opening=opening(shape),
                first_call=FirstCall(speech) if spec.calls.one and config.tools else None,
            )
            for _ in range(values.candidates)
        ]
        hints, receipt = clip_hints(spec.hints, self._link.info)
        run.accept(len(prepared.context), prepared.num_new, receipt, outputs)
        session = ids.session_key(run.key)
        command = Submit(
            request=0,
            session=session,
            tokens=pack_tokens(prepared.context),
            num_new=prepared.num_fresh,
            sampling=values,
            scope=self._settings.sharing_scope(run.key, config),
            hints=hints,
            qos=run.qos,
            predicted=pack_tokens(await self._predicted(run)),
            origin=f"{session}/{spec.request_id}",
        )
        await run.generation.run(self._link, command, limit_s=spec.max_duration_s, ticket=run.ticket)
        return await self._finish(run, base, keep, prepared, sampling.choice(*layers))

    async def _render(
        self, run: TurnRun, base: History, keep: int | None, max_output_tokens: int | None
    ) -> tuple[PreparedTurn, SessionConfig]:
        """Render the new turn; return it with the configuration that the model sees.

        Items after ``keep``, which an edit or a regeneration supersedes, are cut off only here. The record builds on
        ``base`` as stored: the old answer stays in history unless the new one is committed.
        """
        spec, renderer = run.spec, self._renderer.for_tenant(run.key.tenant)
        room = ContextRoom(context_limit(self._link.info), base.config.overflow, max_output_tokens)
        shown = base if keep is None else truncated_to(base, keep)
        stamp = ItemStamp(base.head_item + 1, spec.request_id, now_ms())
        prepared = await renderer.prepare(shown, spec.input, stamp, room)
        framed = await self._with_turn_frame(run, shown)
        if framed is None:
            return prepared, base.config
        # History gets the items as the session renders them; the model sees this turn's frame before them.
        stamp = ItemStamp(framed.head_item + 1, spec.request_id, now_ms())
        seen = await renderer.prepare(framed, spec.input, stamp, room)
        return replace(prepared, context=seen.context, num_new=seen.num_new), framed.config

    async def _predicted(self, run: TurnRun) -> Sequence[int]:
        """Return drafts for the answer: the lost output of an attempt before, or the caller's prediction."""
        if not self._link.info.speculates:
            return ()
        tokens = self.lost.tokens(run)
        if not tokens and run.spec.prediction:
            tokens = await self._renderer.for_tenant(run.key.tenant).predicted_tokens(run.spec.prediction)
        return [token for token in tokens if token < self._link.info.vocab_size]

    async def _with_turn_frame(self, run: TurnRun, base: History) -> History | None:
        """``base`` as it would be with the turn's own system prompt and tools; None if the turn changes neither."""
        frame, config = run.spec.frame, base.config
        if frame == TurnFrame():
            return None
        wanted = msgspec.structs.replace(
            config,
            system_prompt=config.system_prompt if frame.system_prompt is None else frame.system_prompt,
            tools=config.tools if frame.tools is None else frame.tools,
        )
        if wanted == config:
            return None
        prompt = InputEntry(Role.SYSTEM, wanted.system_prompt + wanted.tools)
        self._renderer.check_size((prompt,), context_limit(self._link.info))
        return await with_frame(self._renderer.for_tenant(run.key.tenant), base, wanted, now_ms())

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
            answer = turn_record.completed_answer(run.buffer.outputs, run.generation, choice, run.seed)
        else:
            answer = turn_record.cancelled_answer(run.buffer.outputs, run.generation, order.keep_tokens)
        run.buffer.report(ProgressView(Phase.COMMIT))
        record = turn_record.build(
            run, base, prepared, answer, keep_items=keep, numerics=self._link.info.numerics
        )
        if base.config.binding is None:
            record = msgspec.structs.replace(record, config=self._served.bound(base.config))
        _, is_ours = await self._transcript.append(
            run.key, base, record, functools.partial(self._commit, run, record)
        )
        if not is_ours:
            await self._check_attempt(run)
        if answer.chosen:
            self._link.choose(ids.session_key(run.key), answer.chosen)
        turn = CommittedTurn(record, choice=None, head_revision=record.revision, latest=True)
        return turn_record.committed_view(run.key, turn)

    async def _commit(self, run: TurnRun, record: Record, counts: Counts) -> SessionRow:
        """Append the record, retrying while the store is down. Raises Unavailable: the outcome is then unknown."""
        assert run.state is RunState.COMMITTING
        await async_failpoint("before_commit")
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + self._settings.commit_retry_s, 0.05
        while True:
            try:
                row = await self._store.commit(run.key, run.lease_token, run.fingerprint, record, counts)
                break
            except Unavailable:
                if loop.time() + pause > until:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)
        await async_failpoint("after_commit_before_ack")
        return row

    async def _check_attempt(self, run: TurnRun) -> None:
        """Raise TurnFenced when another replica took this turn over and committed it. The store answers a
        repeated commit of a request id like the first one, whichever attempt made that."""
        # Either the reply to our commit was lost and the chain went on, or the commit was never ours. The
        # record tells.
        revision = await self._store.find_request(run.key, run.spec.request_id)
        stored = (
            None if revision is None else await turn_record.load_committed(self._store, run.key, revision)
        )
        stored_turn = None if stored is None else stored.record.turn
        if stored_turn is None or stored_turn.attempt != run.attempt:
            raise TurnFenced("another replica took the turn over and committed it")

    async def _replay(self, buffer: TurnBuffer, key: Key, request_id: str, revision: int) -> TurnView:
        turn = await turn_record.load_committed(self._store, key, revision)
        if turn is None or turn.record.turn is None:
            raise NotFound("the request id belongs to another kind of change", reason="TURN_NOT_FOUND")
        view = turn_record.committed_view(key, turn)
        result = turn.record.turn
        accepted = Accepted(
            request_id=request_id,
            base_revision=view.base_revision,
            context_tokens=result.usage.context_tokens,
            seed=view.seed,
            attempt=result.attempt,
            replayed=True,
        )
        buffer.accept(accepted, *turn_record.replayed_outputs(view, self._renderer.tokenizer))
        return view


def _keep_items(run: TurnRun, base: History) -> int | None:
    """The last item to keep; None keeps all. Raises NotFound for a number that no live item has."""
    after = run.spec.replace_after_item
    if after is None:
        return None
    if after and all(item.number != after for item in base.items):
        raise NotFound("no such item in the session's live history", reason="ITEM_NOT_FOUND")
    return max(after, system_item(base))
