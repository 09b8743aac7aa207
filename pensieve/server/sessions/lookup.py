"""Finds a turn by its request id or by its mark, for a front end that maps calls to sessions.

A claim says which session a request id is used in. The front end claims the id first; a repeated call then
gets the session of its first try, and a different call under the same id is refused. A claim is stored as a
session without items, under a tenant that no credential can name, so every store copies and expires it like a
session.

A client gives a turn a mark; mark and answer together find the turn in any session of the tenant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pensieve.errors import AlreadyExists, DataLoss, NotFound, RevisionMismatch
from pensieve.server import ids
from pensieve.server.clock import now_ms
from pensieve.server.sessions.quotas import StorageQuotas
from pensieve.server.turns import record as turn_record
from pensieve.server.values import TurnView, fingerprint
from pensieve.store import Counts, HistoryStore, Key
from pensieve.store.records import Record, RecordKind, SessionConfig, SessionRow

CLAIM_TTL_S: Final = 30 * 24 * 3600.0
"""How long a claim is kept; as long as the name of a deleted session."""
_MAX_TRIES: Final = 8
_SESSION, _CALL, _PLAN, _REFUSED = "session", "call", "plan", "refused"
MAX_MATCHES: Final = 8
"""Turns with equal mark and answer that are examined; the newest is nearly always the right one."""


@dataclass(frozen=True, slots=True)
class RequestClaim:
    """Where the call with a request id is carried out."""

    session_id: str
    call: str
    """Digest of the whole call."""
    plan: str
    """Free text of the caller, returned with the claim."""


class RequestClaims:
    """Stateless between calls."""

    def __init__(self, store: HistoryStore, quotas: StorageQuotas) -> None:
        self._store = store
        self._quotas = quotas

    async def claim(self, tenant: str, request_id: str, wanted: RequestClaim) -> RequestClaim:
        """Claim a request id; returns the claim in force, which is ``wanted`` if it is the first. Raises
        AlreadyExists (REQUEST_ID_REUSED) for another call, ResourceExhausted for a first claim of a tenant
        that stores too much."""
        key = _key(tenant, request_id)
        for _ in range(_MAX_TRIES):
            try:
                row = await self._store.load(key)
            except NotFound:
                await self._quotas.check_change(tenant)
                row = await self._create(key, wanted)
            held = _claim(row)
            if (
                row.labels.get(_REFUSED)
                and held != wanted
                and await self._is_replaceable(tenant, request_id, held, wanted)
            ):
                try:
                    row = await self._replace(key, row, _labels(wanted))
                except RevisionMismatch:
                    continue
                held = _claim(row)
            if held.call != wanted.call:
                raise AlreadyExists(
                    "this request id was used for another call", metadata={"request_id": request_id}
                )
            return held
        raise AlreadyExists(
            "this request id is used by too many calls at once", metadata={"request_id": request_id}
        )

    async def record_refusal(self, tenant: str, request_id: str, session_id: str) -> None:
        """The call was refused in this session: the next claim replaces its claim, unless the turn exists by then."""
        key = _key(tenant, request_id)
        try:
            row = await self._store.load(key)
            if row.labels.get(_SESSION) == session_id and not row.labels.get(_REFUSED):
                await self._replace(key, row, {**row.labels, _REFUSED: "1"})
        except (NotFound, RevisionMismatch):
            return  # it has expired, or was changed meanwhile

    # ---- parts

    async def _is_replaceable(
        self, tenant: str, request_id: str, held: RequestClaim, wanted: RequestClaim
    ) -> bool:
        """Whether ``wanted`` replaces a refused claim; not for the same call while its session exists."""
        has_it = await _has_turn(self._store, Key(tenant, held.session_id), request_id)
        return has_it is None or (not has_it and held.call != wanted.call)

    async def _create(self, key: Key, wanted: RequestClaim) -> SessionRow:
        config, labels = SessionConfig(ttl_s=CLAIM_TTL_S), _labels(wanted)
        record = Record(revision=1, kind=RecordKind.CREATE, time_ms=now_ms(), config=config, labels=labels)
        row = SessionRow(tenant=key.tenant, session_id=key.session_id, config=config, labels=labels)
        try:
            return await self._store.create(row, record, fingerprint("claim", labels))
        except AlreadyExists:
            return await self._store.load(key)

    async def _replace(self, key: Key, row: SessionRow, labels: dict[str, str]) -> SessionRow:
        """Raises RevisionMismatch when another change came first."""
        record = Record(revision=row.revision + 1, kind=RecordKind.UPDATE, time_ms=now_ms(), labels=labels)
        return await self._store.apply(key, "", record, Counts(0, 0, 0), expected_revision=row.revision)


def _key(tenant: str, request_id: str) -> Key:
    return Key(ids.claims_tenant(tenant), f"claim-{request_id.replace('-', '').lower()}")


def _labels(claim: RequestClaim) -> dict[str, str]:
    return {_SESSION: claim.session_id, _CALL: claim.call, _PLAN: claim.plan}


def _claim(row: SessionRow) -> RequestClaim:
    labels = row.labels
    return RequestClaim(labels.get(_SESSION, ""), labels.get(_CALL, ""), labels.get(_PLAN, ""))


@dataclass(frozen=True, slots=True)
class MarkedView:
    """A turn, and the candidate that matches the answer."""

    view: TurnView
    candidate: int


async def find_turn(
    store: HistoryStore, tenant: str, mark: str, answer: str | None, request_id: str
) -> MarkedView:
    """The newest turn with this mark and answer (None: any), first of all in a session that has
    ``request_id``. Raises NotFound (TURN_NOT_FOUND)."""
    marked = await store.find_marked(tenant, mark, answer, limit=MAX_MATCHES)
    if request_id and len(marked) > 1:
        has_it = [await _has_turn(store, Key(tenant, one.session_id), request_id) for one in marked]
        marked = sorted(marked, key=lambda one: not has_it[marked.index(one)])
    for one in marked:
        found = await _marked_view(store, Key(tenant, one.session_id), one.revision, mark, answer)
        if found is not None:
            return found
    raise NotFound("no turn has this mark and this answer", reason="TURN_NOT_FOUND")


async def _marked_view(
    store: HistoryStore, key: Key, revision: int, mark: str, answer: str | None
) -> MarkedView | None:
    """Read the turn itself, since the index may be stale; None when it does not match or is gone."""
    try:
        turn = await turn_record.load_committed(store, key, revision)
    except (NotFound, DataLoss):
        return None  # the session is gone or damaged
    if turn is None or turn.record.turn is None or turn.record.turn.mark != mark:
        return None
    view = turn_record.committed_view(key, turn)
    if answer is None:
        return MarkedView(view, view.chosen)
    texts = [each.text for each in view.candidates] or [view.output.text if view.output is not None else ""]
    return MarkedView(view, texts.index(answer)) if answer in texts else None


async def _has_turn(store: HistoryStore, key: Key, request_id: str) -> bool | None:
    """Whether the session has a running or committed turn with this request id; None without such a session."""
    try:
        running = (await store.load(key)).running
        # Read second: a turn that no longer runs has been committed by now, if it ever will be.
        committed = await store.find_request(key, request_id)
    except NotFound:
        return None
    return committed is not None or (running is not None and running.request_id == request_id)
