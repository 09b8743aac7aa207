"""The registry of all turns of this process: start, re-attach, replay, look up, cancel, drain.

It holds a run from before its first await until just before its outcome is delivered. So a duplicate that
arrives at any time either joins the run or finds the store changed.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from pensieve.core import TenantQos
from pensieve.errors import AlreadyExists, Cancelled, NotFound, PensieveError, Unavailable
from pensieve.logs import bind
from pensieve.server.admission import AdmissionGate, AdmissionTicket
from pensieve.server.failures import draining, report_bug
from pensieve.server.settings import TurnSettings
from pensieve.server.turns import record as turn_record
from pensieve.server.turns.buffer import TurnBuffer
from pensieve.server.turns.lease import end_remote_turn, turn_cancelled
from pensieve.server.turns.run import Order, RunState, TurnRun
from pensieve.server.turns.runner import TurnRunner
from pensieve.server.values import NewTurn, OnDisconnect, TurnEnd, TurnStatus, TurnView
from pensieve.store import EndOrder, HistoryStore, Key

TurnKey = tuple[Key, str]


class CancelledStreams:
    """Streams that their callers cancelled: a late request of such a stream must not begin its turn again.

    A StreamTurn may arrive after the CancelTurn of its caller, delayed or over another connection. The
    request id cannot distinguish it from a deliberate new attempt; the stream id can. "" is no stream.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._streams: OrderedDict[tuple[Key, str, str], None] = OrderedDict()

    def add(self, key: Key, request_id: str, stream_id: str) -> None:
        if not stream_id:
            return
        self._streams[key, request_id, stream_id] = None
        self._streams.move_to_end((key, request_id, stream_id))
        while len(self._streams) > self._most:
            self._streams.popitem(last=False)

    def forget(self, key: Key, request_id: str, stream_id: str) -> None:
        self._streams.pop((key, request_id, stream_id), None)

    def has(self, key: Key, request_id: str, stream_id: str) -> bool:
        return (key, request_id, stream_id) in self._streams


class Playback:
    """Shows one caller a turn that is in history, or that another server commits; never begins it. It is not
    registered: a real retry, whose fingerprint must be compared, must not join it."""

    def __init__(self, fill: Callable[[TurnBuffer], Awaitable[TurnView]]) -> None:
        self.buffer = TurnBuffer()
        self._task = asyncio.create_task(self._play(fill), name="playback")

    async def _play(self, fill: Callable[[TurnBuffer], Awaitable[TurnView]]) -> None:
        outcome: TurnView | PensieveError = _stopping()
        try:
            outcome = await _outcome(fill(self.buffer))
        finally:
            self.buffer.end(outcome)

    def leave(self) -> None:
        self._task.cancel()


class Turns:
    """Used on one event loop."""

    def __init__(
        self,
        store: HistoryStore,
        runner: TurnRunner,
        settings: TurnSettings,
        gate: AdmissionGate,
        on_turn_end: Callable[[TurnEnd], None],
        on_turn_refused: Callable[[str, str], None],
    ) -> None:
        """``on_turn_end`` is called before any caller hears the outcome; ``on_turn_refused`` with tenant and
        reason."""
        self._store = store
        self._runner = runner
        self._settings = settings
        self._gate = gate
        self._on_turn_end = on_turn_end
        self._on_turn_refused = on_turn_refused
        self._runs: dict[TurnKey, TurnRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """Strong references: the event loop holds tasks only weakly."""
        self._wait_timers: dict[TurnRun, asyncio.TimerHandle] = {}
        self._discarded: OrderedDict[TurnKey, str] = OrderedDict()
        self._cancelled_streams = CancelledStreams(settings.discarded_turns)
        self._draining = False
        self._run_ended = asyncio.Event()

    @property
    def running(self) -> int:
        return len(self._runs)

    @property
    def draining(self) -> bool:
        return self._draining

    def has_running_turn(self, key: Key) -> bool:
        """Whether a turn of this session runs in this process, or is about to."""
        return any(session == key for session, _ in self._runs)

    def may_warm(self, key: Key) -> bool:
        """Whether the limits of the session's tenant allow a warm-up."""
        return self._gate.may_warm(key.tenant)

    def qos_for(self, key: Key) -> TenantQos:
        """The share and priority of work on this session other than its turns."""
        return self._gate.qos(key.tenant)

    @asynccontextmanager
    async def attach(
        self,
        key: Key,
        spec: NewTurn,
        *,
        policy: OnDisconnect,
        attach_only: bool,
        deadline_s: float | None = None,
        stream_id: str = "",
    ) -> AsyncIterator[tuple[TurnBuffer, bool]]:
        """Attach to a turn, starting it if need be. Yields its buffer and whether it had been started before.
        Leaving without the outcome is a disconnect, without grace at or after ``deadline_s`` (seconds from
        now). Raises Cancelled when the caller cancelled this stream before."""
        loop = asyncio.get_running_loop()
        deadline = None if deadline_s is None else loop.time() + deadline_s
        found, joined = await self._find_or_start(key, spec, attach_only, deadline_s, stream_id)
        if isinstance(found, Playback):
            try:
                yield found.buffer, True
            finally:
                found.leave()
            return
        found.join(policy)
        try:
            yield found.buffer, joined
        finally:
            # The caller's clock may be slightly ahead of ours.
            late = deadline is not None and loop.time() >= deadline - 0.1
            found.leave(0.0 if late else self._settings.disconnect_grace_s)

    async def get(self, key: Key, request_id: str) -> TurnView:
        """State and result of a turn. Raises NotFound (TURN_NOT_FOUND)."""
        view = await self._find(key, request_id)
        if view is None:
            raise _not_found()
        return view

    async def _find(self, key: Key, request_id: str) -> TurnView | None:
        run = self._runs.get((key, request_id))
        if run is not None and run.state.had_lease:
            return run.view
        committed = await self._committed(key, request_id)
        if committed is not None:
            return committed
        row = await self._store.load(key)
        if row.running is not None and row.running.request_id == request_id:
            return TurnView(
                session_id=key.session_id,
                request_id=request_id,
                state=TurnStatus.RUNNING,
                base_revision=row.revision,
            )
        # Another server may have committed it between the two reads.
        committed = await self._committed(key, request_id)
        reason = self._discarded.get((key, request_id))
        if committed is None and reason is not None:
            return _discarded(key, request_id, reason)
        return committed

    async def cancel(
        self, key: Key, request_id: str, *, keep: bool, keep_tokens: int | None, stream_id: str = ""
    ) -> TurnView:
        """Stop a running turn, on whichever server it runs; return its state afterwards. Raises Unavailable
        (TURN_RUNNING_ELSEWHERE) when another server does not end it.

        Late requests of stream ``stream_id`` will not begin the turn, unless it is in history. With ``keep``,
        cancelling an unknown turn (NotFound) has no effect.
        """
        self._runner.lost.forget(key, request_id)
        if not keep:
            self._cancelled_streams.add(key, request_id, stream_id)  # before the first await
        view = await self._end(key, request_id, keep, keep_tokens)
        if view.state is TurnStatus.COMMITTED:
            self._cancelled_streams.forget(key, request_id, stream_id)
        elif view.state is TurnStatus.DISCARDED:
            self._cancelled_streams.add(key, request_id, stream_id)
        return view

    async def end_session(self, key: Key, error: PensieveError) -> None:
        """End all turns of a deleted session with ``error``. Returns when they have ended."""
        runs = [run for (session, _), run in self._runs.items() if session == key]
        for run in runs:
            run.end_early(Order(error=error))
        for run in runs:
            await run.buffer.wait_for_end()
        self._runner.lost.forget(key)

    async def drain(self, deadline_s: float) -> int:
        """Refuse new turns, wait for the running ones, discard the rest; return how many. Attach and replay go on."""
        self._draining = True
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline_s
        for run in self._runs.values():
            if run.state is RunState.FOLLOWING:  # another server can wait as well
                run.end_early(Order(error=draining()))
        while self._runs and loop.time() < until:
            await self._wait_for_end(until - loop.time())
        remaining = list(self._runs.values())
        for run in remaining:
            run.end_early(Order(error=draining()))
        while self._runs:
            await self._wait_for_end(1.0)
        return len(remaining)

    # ---- parts

    async def _end(self, key: Key, request_id: str, keep: bool, keep_tokens: int | None) -> TurnView:
        """End a turn on whichever server runs it; return its state. If it is discarded, it no longer runs here."""
        turn = (key, request_id)
        while True:
            run = self._runs.get(turn)
            try:
                if run is None:
                    view = await self._end_remote(key, request_id, EndOrder(keep, keep_tokens))
                else:
                    error = None if keep else turn_cancelled()
                    run.end_early(Order(keep_tokens if keep else None, error, by_caller=True))
                    view = await run.buffer.outcome()
            except Cancelled as discarded:
                view = _discarded(key, request_id, discarded.reason)
            except NotFound:
                if turn not in self._runs:
                    raise
                continue  # it arrived during the look-up
            if view.state is TurnStatus.COMMITTED or turn not in self._runs:
                return view

    async def _end_remote(self, key: Key, request_id: str, order: EndOrder) -> TurnView:
        before = await self._find(key, request_id)
        if before is not None and before.state is TurnStatus.COMMITTED:
            return before
        # Also if it does not run: its lease may have lapsed, and the holder could commit it yet.
        await end_remote_turn(self._store, key, request_id, order, self._settings.lease_s)
        after = await self._find(key, request_id)
        if after is None and before is None:
            raise _not_found()
        return after or _discarded(key, request_id, turn_cancelled().reason)

    async def _find_or_start(
        self, key: Key, spec: NewTurn, attach_only: bool, deadline_s: float | None, stream_id: str
    ) -> tuple[TurnRun | Playback, bool]:
        """Return the registered run of this turn and True, or a new run and False; with ``attach_only``, a playback
        of one that is not registered and True.

        There is no await between the last look into the registry and the registration: two calls with one
        request id cannot both start it. A turn in history is replayed however busy the server is, so a
        refusal costs one look into the store.
        """
        turn = (key, spec.request_id)
        while (run := self._runs.get(turn)) is not None and run.abandoned:
            # A late caller starts again. It must not see the abandoned attempt's error.
            await run.buffer.wait_for_end()
            if run.cancelled_by_caller:
                raise turn_cancelled()
        if run is None and attach_only:
            revision = await self._store.find_request(key, spec.request_id)
            run = self._runs.get(turn)  # another call may have started it during the look-up
            if run is None:
                return await self._play_back(key, spec.request_id, revision), True
        refusal = None
        if run is None:
            refusal = draining() if self._draining else self._gate.refusal(key.tenant, spec, deadline_s)
        if refusal is not None:
            revision = await self._store.find_request(key, spec.request_id)
            run = self._runs.get(turn)
            if run is None and revision is None:
                self._on_turn_refused(key.tenant, refusal.reason)
                raise refusal
        if self._cancelled_streams.has(*turn, stream_id):
            raise turn_cancelled()
        if run is None:
            ticket = self._gate.admit(key.tenant, spec) if refusal is None else None
            return self._start(key, spec, ticket), False
        if not attach_only and run.fingerprint != spec.fingerprint():
            raise AlreadyExists(
                "this request id was used for another turn", metadata={"request_id": spec.request_id}
            )
        return run, True

    def _start(self, key: Key, spec: NewTurn, ticket: AdmissionTicket | None) -> TurnRun:
        """Register and start a run. ``ticket``: None for a turn that is in history."""
        run = self._runs[key, spec.request_id] = TurnRun(key, spec, spec.fingerprint(), ticket)
        if self._gate.max_wait_s > 0:
            self._schedule_wait_check(run, self._gate.max_wait_s)
        task = asyncio.create_task(self._play(run), name=f"turn {run.attempt}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return run

    async def _play_back(self, key: Key, request_id: str, revision: int | None) -> Playback:
        """``revision``: of the turn in history; None if it was not there. Raises NotFound (TURN_NOT_FOUND)."""
        if revision is None:
            row = await self._store.load(key)
            if row.running is None or row.running.request_id != request_id:
                # It may have been committed between the two reads.
                revision = await self._store.find_request(key, request_id)
                if revision is None:
                    raise _not_found()

        async def fill(buffer: TurnBuffer) -> TurnView:
            bind(session=key.session_id, request_id=request_id)
            return await self._runner.replay(key, request_id, revision, buffer)

        return Playback(fill)

    def _schedule_wait_check(self, run: TurnRun, after_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._wait_timers[run] = loop.call_later(after_s, self._refuse_if_overdue, run)

    def _refuse_if_overdue(self, run: TurnRun) -> None:
        """Called after the longest permitted wait, and again from time to time while the turn still waits."""
        if run.ticket is None or not run.ticket.waits:
            return
        waits_here = run.state in (RunState.BEGINNING, RunState.GENERATING)
        error = self._gate.overdue(run.ticket) if waits_here else None
        if error is not None:
            run.end_early(Order(error=error))
            return
        self._schedule_wait_check(run, self._gate.max_wait_s / 8)

    async def _play(self, run: TurnRun) -> None:
        """Do the work of a run: its callers get an outcome whatever happens."""
        bind(session=run.key.session_id, request_id=run.spec.request_id)
        outcome: TurnView | PensieveError = _stopping()
        try:
            outcome = await _outcome(self._runner.play(run))
        finally:
            # Unregister first: a caller that hears the outcome and retries must not join this run.
            self._retire(run, outcome)
            run.end(outcome)

    def _retire(self, run: TurnRun, outcome: TurnView | PensieveError) -> None:
        turn = (run.key, run.spec.request_id)
        del self._runs[turn]
        timer = self._wait_timers.pop(run, None)
        if timer is not None:
            timer.cancel()
        self._runner.lost.on_attempt_ended(run, outcome)
        self._run_ended.set()
        end = run.summary(outcome)
        had_lease = run.state.had_lease
        if run.ticket is not None:
            used = end.usage.new_tokens + end.usage.recomputed_tokens + end.generated_tokens
            if run.generation.is_cut_search:
                used = max(used, round(run.ticket.work))
            run.ticket.on_ended(used if had_lease else 0, end.usage.output_tokens if had_lease else 0)
        if not had_lease:
            return
        self._discarded.pop(turn, None)
        # A commit that was not confirmed may yet be on its way to the store.
        if isinstance(outcome, PensieveError) and run.state is not RunState.COMMITTING:
            self._discarded[turn] = outcome.reason
            while len(self._discarded) > self._settings.discarded_turns:
                self._discarded.popitem(last=False)
        self._on_turn_end(end)

    async def _committed(self, key: Key, request_id: str) -> TurnView | None:
        revision = await self._store.find_request(key, request_id)
        turn = None if revision is None else await turn_record.load_committed(self._store, key, revision)
        return None if turn is None else turn_record.committed_view(key, turn)

    async def _wait_for_end(self, timeout_s: float) -> None:
        self._run_ended.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._run_ended.wait()
        except TimeoutError:
            return


async def _outcome(work: Awaitable[TurnView]) -> TurnView | PensieveError:
    try:
        return await work
    except PensieveError as error:
        return error
    except Exception as error:
        return report_bug(error, "a turn")


def _stopping() -> Unavailable:
    return Unavailable("the server is stopping", reason="DRAINING")


def _discarded(key: Key, request_id: str, reason: str) -> TurnView:
    return TurnView(
        session_id=key.session_id,
        request_id=request_id,
        state=TurnStatus.DISCARDED,
        discard_reason=reason,
    )


def _not_found() -> NotFound:
    return NotFound("no such turn in this session", reason="TURN_NOT_FOUND")
