"""Compaction: the model summarises a session, and the summary takes the place of its older turns.

Three steps, each durable and found again by a repeated call with the same request id:

1. fork the session: the branch keeps the whole history;
2. run a turn on the branch that asks for the summary: the branch shares the session's cached prefix;
3. replace the session's older turns by the summary, in one change at the revision of the fork.

Until the third step the session is as before. A turn that was committed meanwhile makes it fail: the session goes on
uncompacted, and the branch is deleted. Afterwards the new context is warmed, so that the next turn does not compute it.

The branch of a finished compaction has its session's idle lifetime: the old context stays available. The branch of a
compaction that fails expires. A repeated call finds it before that, but a compaction by policy is never repeated, and a
session whose model writes no summary would gain a copy of its history with each turn.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pensieve.core import Role, SamplingDefaults, Usage
from pensieve.debug import async_failpoint
from pensieve.errors import FailedPrecondition, NotFound, PensieveError, RevisionMismatch, TurnInProgress
from pensieve.server import ids
from pensieve.server.failures import report_bug
from pensieve.server.history.transcript import Transcript
from pensieve.server.sessions import records as session_records
from pensieve.server.sessions.records import NewFork
from pensieve.server.sessions.sessions import Sessions, check_revision
from pensieve.server.sessions.warming import SessionWarmer
from pensieve.server.tasks import cancel_and_wait
from pensieve.server.turns.turns import Turns
from pensieve.server.values import (
    CallRules,
    InputEntry,
    NewTurn,
    OnDisconnect,
    TurnEnd,
    TurnView,
    fingerprint,
)
from pensieve.speech import SpeechReader, Words
from pensieve.store import Counts, Key
from pensieve.store.records import SessionRow

log = logging.getLogger(__name__)

INSTRUCTION: Final = (
    "Summarise the conversation so far, for yourself: your summary takes its place. Keep what the user wants, names, "
    "numbers, decisions, results of tools, and open questions. Write the summary only."
)
HEADING: Final = "Summary of the conversation so far:\n"
MAX_SUMMARY_TOKENS: Final = 512
UNFINISHED_TTL_S: Final = 24 * 3600.0
"""Longest idle lifetime of a branch before the summary is there. A call that is repeated later begins anew."""
_NAMES: Final = uuid.UUID("b7a3c1de-6f20-5b1c-9a44-2f6de0c4c6b5")


@dataclass(frozen=True, slots=True)
class CompactionRequest:
    request_id: str
    keep_turns: int
    instruction: str = ""
    max_summary_tokens: int | None = None
    expected_revision: int | None = None


@dataclass(frozen=True, slots=True)
class CompactionAnswer:
    row: SessionRow
    branch_id: str
    summary: str
    usage: Usage | None
    """Receipt of the turn that made the summary."""


class Compactor:
    """Stateless between calls."""

    def __init__(
        self, transcript: Transcript, sessions: Sessions, turns: Turns, warmer: SessionWarmer
    ) -> None:
        self._transcript = transcript
        self._store = transcript.store
        self._sessions = sessions
        self._turns = turns
        self._warmer = warmer

    async def compact(self, key: Key, request: CompactionRequest) -> CompactionAnswer:
        """Compact the session. Raises FailedPrecondition (NOTHING_TO_COMPACT, SUMMARY_EMPTY), RevisionMismatch if the
        session changes meanwhile, TurnInProgress, and the errors of forks and turns."""
        mark = fingerprint("compact", request.keep_turns, request.instruction, request.max_summary_tokens)
        revision = await self._store.find_request(key, request.request_id)
        if revision is not None:
            return await self._done(key, request, revision, mark)
        row, history = await self._transcript.read(key, known_revision=request.expected_revision)
        if row.running is not None:
            raise TurnInProgress(
                "a turn is running in this session",
                metadata={"active_request_id": row.running.request_id},
                retry_after_s=row.running.lease_ms_left / 1000,
            )
        # The fork of an earlier try would be found whatever the revision is now.
        check_revision(history.revision, request.expected_revision)
        session_records.check_compactable(history, request.keep_turns)
        branch = Key(key.tenant, _branch_id(key, request.request_id, history.revision))
        await async_failpoint("before_compaction_fork")
        lifetime = history.config.ttl_s
        fork = NewFork(
            session_id=branch.session_id,
            expected_revision=history.revision,
            ttl_s=min(lifetime or UNFINISHED_TTL_S, UNFINISHED_TTL_S),
        )
        await self._sessions.fork(key, fork)
        try:
            view = await self._summarise(branch, request)
            summary = self._words(view)
            # Before the session refers to it. A kill in between leaves a branch that nothing needs, rather than a
            # compacted session whose old context expires.
            await self._sessions.set_lifetime(branch, lifetime)
        except NotFound:  # another call with this request id has deleted it, as below
            raise RevisionMismatch("the session has changed during its compaction") from None
        await async_failpoint("before_compaction_commit")
        try:
            row = await self._sessions.put_summary(
                key, history, HEADING + summary, request.keep_turns, request.request_id, mark
            )
        except RevisionMismatch:
            # No later call with this request id forks at this revision.
            await self._sessions.delete(branch, expected_revision=None, allow_missing=True)
            raise
        await async_failpoint("after_compaction_commit")
        await self._warm(key)
        return CompactionAnswer(row, branch.session_id, summary, view.usage)

    async def compact_by_policy(self, key: Key, turn_id: str) -> None:
        """Compact the session as its settings say, after this turn. Raises as ``compact`` does."""
        keep = (await self._store.load(key)).config.keep_turns
        # Servers that see the same turn end make one compaction.
        request_id = str(uuid.uuid5(_NAMES, f"{key.tenant}/{key.session_id}/{turn_id}"))
        await self.compact(key, CompactionRequest(request_id, keep))

    async def _done(self, key: Key, request: CompactionRequest, revision: int, mark: str) -> CompactionAnswer:
        """Answer a request that was carried out before. Raises AlreadyExists (REQUEST_ID_REUSED) for another one."""
        piece = await self._store.read_slice(key, after_revision=revision - 1, limit=1)
        record = piece.records[0].record
        row = await self._store.apply(key, mark, record, Counts(0, 0, 0))  # finds the request id
        summary = record.config.summary if record.config is not None else ""
        return CompactionAnswer(
            row, _branch_id(key, request.request_id, revision - 1), summary.removeprefix(HEADING), None
        )

    async def _summarise(self, branch: Key, request: CompactionRequest) -> TurnView:
        turn = NewTurn(
            request_id=_summary_turn_id(branch),
            input=(InputEntry(Role.USER, request.instruction or INSTRUCTION),),
            sampling=SamplingDefaults(
                max_output_tokens=request.max_summary_tokens or MAX_SUMMARY_TOKENS, candidates=1, beam_width=1
            ),
            rules=CallRules(none=True),
        )
        attach = self._turns.attach(branch, turn, policy=OnDisconnect.FINISH, attach_only=False)
        async with attach as (buffer, _):
            return await buffer.outcome()

    def _words(self, view: TurnView) -> str:
        """Return the summary without the model's thoughts. Raises FailedPrecondition (SUMMARY_EMPTY)."""
        reader = SpeechReader(self._transcript.renderer.tokenizer.speech)
        text = view.output.text if view.output is not None else ""
        parts = [*reader.push(text), *reader.finish()]
        words = "".join(part.text for part in parts if isinstance(part, Words)).strip()
        if not words:
            raise FailedPrecondition(
                "the model wrote no summary: change instruction or max_summary_tokens, under a new request id",
                reason="SUMMARY_EMPTY",
            )
        return words

    async def _warm(self, key: Key) -> None:
        try:
            await self._warmer.warm(key)
        except PensieveError as error:
            log.info("the compacted session was not warmed: %s", error.reason)


def _branch_id(key: Key, request_id: str, base: int) -> str:
    return ids.derived_session_id("compact", key.tenant, f"{key.session_id}\0{request_id}\0{base}")


def _summary_turn_id(branch: Key) -> str:
    return str(uuid.uuid5(_NAMES, f"{branch.tenant}/{branch.session_id}"))


class IdleCompaction:
    """Compacts the sessions whose context has reached their ``compact_at``, each once at a time. What goes wrong is
    logged and counted; the session then stays as it is until its next turn ends."""

    def __init__(self, compactor: Compactor, on_compacted: Callable[[str], None]) -> None:
        """``on_compacted`` is called with ``compacted``, or the error's reason."""
        self._compactor = compactor
        self._on_compacted = on_compacted
        self._tasks: dict[Key, asyncio.Task[None]] = {}

    def turn_ended(self, end: TurnEnd) -> None:
        key, tokens = end.key, end.context_tokens + end.usage.output_tokens
        # The fork that holds a summary's turn has the same setting. It must not be compacted in turn.
        makes_summary = end.request_id == _summary_turn_id(key)
        if not end.compact_at or tokens < end.compact_at or makes_summary or not end.committed:
            return
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._compact(key, end.request_id), name="compaction")
            self._tasks[key].add_done_callback(lambda _: self._tasks.pop(key))

    async def close(self) -> None:
        """Cancel what runs. Each session is left as before, or compacted."""
        for task in list(self._tasks.values()):
            await cancel_and_wait(task)

    async def _compact(self, key: Key, turn_id: str) -> None:
        outcome = "bug"
        try:
            await self._compactor.compact_by_policy(key, turn_id)
            outcome = "compacted"
        except PensieveError as error:
            outcome = error.reason.lower()
            log.info("the session %s was not compacted: %s", key.session_id, error.reason)
        except Exception as error:
            report_bug(error, "a compaction")
        finally:
            self._on_compacted(outcome)
