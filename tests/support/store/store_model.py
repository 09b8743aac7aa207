"""What a history store must do, as plainly as it can be said: the reference that real stores are compared with.

Time is two events, "every lease lapses" and "every session with a time to live expires". Written apart from the
stores' own rules on purpose. Every operation returns its outcome as a tuple, errors included.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

Outcome = tuple[object, ...]

MISSING = ("NotFound", "SESSION_NOT_FOUND")
DELETED = ("NotFound", "SESSION_DELETED")
DAMAGED = ("FailedPrecondition", "SESSION_DAMAGED")
REUSED = ("AlreadyExists", "REQUEST_ID_REUSED")
FENCED = ("TurnFenced", "TURN_FENCED")
REGRESSED = ("DataLoss", "HISTORY_REGRESSED")
MISMATCH = ("RevisionMismatch", "REVISION_MISMATCH")


@dataclass
class ModelTurn:
    request_id: str
    fingerprint: str
    token: str
    seed: int
    lapsed: bool = False
    order: int | None = None
    """Tokens to keep, as whoever asked first wants it."""
    followed: bool = False
    called_off: bool = False


@dataclass
class ModelSession:
    created_by: str
    ttl: bool
    subject: str = ""
    log: list[str] = field(default_factory=lambda: [""])
    """Request id of each record; its length is the revision."""
    known: dict[str, tuple[str, int]] = field(default_factory=dict)
    state: str = "active"
    turn: ModelTurn | None = None
    marks: list[tuple[str, int]] = field(default_factory=list)
    """Mark and revision of its turns that have one."""

    def row(self) -> Outcome:
        running = self.turn.request_id if self.turn is not None and not self.turn.lapsed else None
        return ("row", self.state, len(self.log), running)

    def append(self, request_id: str, fingerprint: str) -> Outcome:
        self.log.append(request_id)
        if request_id:
            self.known[request_id] = (fingerprint, len(self.log))
        self.turn = None
        return self.row()


class Model:
    """The sessions of one tenant."""

    def __init__(self) -> None:
        self.sessions: dict[str, ModelSession] = {}

    def revision(self, name: str) -> int:
        """Current revision; 0 when there is no such session."""
        return len(self.sessions[name].log) if self._absent(name) is None else 0

    def live(self) -> list[str]:
        return sorted(name for name in self.sessions if self._absent(name) is None)

    def expiring(self) -> list[str]:
        return [name for name in self.live() if self.sessions[name].ttl]

    def lapse_all(self) -> None:
        for session in self.sessions.values():
            if session.turn is not None:
                session.turn.lapsed = True

    def expire_all(self) -> None:
        for name in self.expiring():
            del self.sessions[name]
        self.lapse_all()

    def create(self, name: str, fingerprint: str, ttl: bool, subject: str = "") -> Outcome:
        if self._absent(name) == DELETED:
            return DELETED
        if name not in self.sessions:
            self.sessions[name] = ModelSession(fingerprint, ttl, subject)
        elif self.sessions[name].created_by != fingerprint:
            return ("AlreadyExists", "SESSION_EXISTS")
        return self.sessions[name].row()

    def load(self, name: str) -> Outcome:
        return self._absent(name) or self.sessions[name].row()

    def read(self, name: str, after: int) -> Outcome:
        absent = self._absent(name)
        if absent is not None:
            return absent
        log = self.sessions[name].log
        return REGRESSED if after > len(log) else ("log", *log[after:])

    def read_slice(self, name: str, after: int, limit: int, knows_head: bool) -> Outcome:
        whole = self.read(name, after)
        if whole[0] != "log" or (after and not knows_head):
            return REGRESSED if whole[0] == "log" else whole
        return ("slice", len(self.sessions[name].log), *whole[1:][:limit])

    def marked(self, mark: str) -> set[tuple[str, int]]:
        """Session and revision of each turn of a session that there is."""
        return {
            (name, revision)
            for name in self.live()
            for known, revision in self.sessions[name].marks
            if known == mark
        }

    def about(self, subject: str) -> list[str]:
        """Sessions about someone, and damaged ones of which that is not known."""
        return [
            name
            for name in self.live()
            if self.sessions[name].subject == subject
            or (self.sessions[name].state == "damaged" and not self.sessions[name].subject)
        ]

    def find_request(self, name: str, request_id: str) -> Outcome:
        absent = self._absent(name)
        return absent or ("found", self.sessions[name].known.get(request_id, ("", None))[1])

    def begin(
        self,
        name: str,
        request_id: str,
        fingerprint: str,
        token: str,
        seed: int,
        expected: int | None,
        follows: bool,
        known: tuple[int, bool] = (0, True),
    ) -> Outcome:
        """``known``: the revision that the caller has seen, and whether its hash is the store's."""
        refused = self._unwritable(name)
        if refused is not None:
            return refused
        session = self.sessions[name]
        if request_id in session.known:
            known_as, revision = session.known[request_id]
            return ("replay", revision) if known_as == fingerprint else REUSED
        if known[0] > len(session.log) or not known[1]:
            return REGRESSED
        turn = session.turn
        if turn is not None and turn.token == token:
            return ("began", len(session.log), turn.seed)
        if turn is not None and not turn.lapsed:
            if turn.request_id != request_id:
                return ("TurnInProgress", "TURN_IN_PROGRESS", turn.request_id)
            if turn.fingerprint != fingerprint:
                return REUSED
            turn.followed |= follows
            return ("elsewhere",)
        if turn is not None and turn.called_off and follows and turn.request_id == request_id:
            return ("called off",)
        if expected is not None and expected != len(session.log):
            return REGRESSED if expected > len(session.log) else MISMATCH
        if turn is not None and (turn.request_id, turn.fingerprint) == (request_id, fingerprint):
            seed = turn.seed
        session.turn = ModelTurn(request_id, fingerprint, token, seed)
        return ("began", len(session.log), seed)

    def renew(self, name: str, token: str) -> Outcome:
        absent = self._absent(name)
        if absent is not None:
            return absent
        turn = self.sessions[name].turn
        if turn is None or turn.token != token:
            return FENCED
        turn.lapsed = False
        news, turn.followed = ("renewed", turn.order, turn.followed), False
        return news

    def ask_to_end(self, name: str, request_id: str, keep: int) -> Outcome:
        """``keep``: number of tokens to keep; 0 discards the turn."""
        absent = self._absent(name)
        if absent is not None:
            return absent
        turn = self.sessions[name].turn
        if turn is None or turn.request_id != request_id:
            return ("asked", False)
        if turn.lapsed:
            turn.token, turn.called_off = "", turn.called_off or keep == 0
            return ("asked", False)
        turn.order = keep if turn.order is None else turn.order
        return ("asked", True)

    def commit(
        self, name: str, token: str, request_id: str, fingerprint: str, base: int, mark: str = ""
    ) -> Outcome:
        absent = self._absent(name)
        if absent is not None:
            return absent
        session = self.sessions[name]
        if request_id in session.known:
            return session.row() if session.known[request_id][0] == fingerprint else REUSED
        if session.state == "damaged":
            return DAMAGED
        if session.turn is None or session.turn.token != token or base != len(session.log):
            return FENCED
        if mark:
            session.marks.append((mark, len(session.log) + 1))
        return session.append(request_id, fingerprint)

    def abort(self, name: str, token: str, called_off: bool) -> Outcome:
        session = self.sessions.get(name)
        if session is not None and session.turn is not None and session.turn.token == token:
            if called_off:
                session.turn.token, session.turn.lapsed, session.turn.called_off = "", True, True
            else:
                session.turn = None
        return ("done",)

    def apply(
        self,
        name: str,
        request_id: str,
        fingerprint: str,
        base: int,
        expected: int | None,
        erases: Collection[int] = (),
    ) -> Outcome:
        """``erases``: revisions of which little is left, and no mark."""
        refused = self._unwritable(name)
        if refused is not None:
            return refused
        session = self.sessions[name]
        if request_id in session.known:
            return session.row() if session.known[request_id][0] == fingerprint else REUSED
        if session.turn is not None and not session.turn.lapsed:
            return ("TurnInProgress", "TURN_IN_PROGRESS", session.turn.request_id)
        if expected is not None and expected > len(session.log):
            return REGRESSED
        if base != len(session.log) or expected not in (None, base):
            return MISMATCH
        session.marks = [one for one in session.marks if one[1] not in erases]
        return session.append(request_id, fingerprint)

    def delete(self, name: str, expected: int | None, allow_missing: bool) -> Outcome:
        absent = self._absent(name)
        if absent == MISSING:
            return ("done",) if allow_missing else MISSING
        if absent is None:
            revision = len(self.sessions[name].log)
            if expected is not None and expected != revision:
                return REGRESSED if expected > revision else MISMATCH
            self.sessions[name] = ModelSession("", ttl=False, state="deleted")
        return ("done",)

    def forget(self, name: str, knows_head: bool) -> Outcome:
        if self._absent(name) is not None:
            return ("done",)
        session = self.sessions[name]
        if session.state == "damaged":
            return DAMAGED
        if session.turn is not None and not session.turn.lapsed:
            return ("TurnInProgress", "TURN_IN_PROGRESS", session.turn.request_id)
        if not knows_head:
            return MISMATCH
        del self.sessions[name]
        return ("done",)

    def mark_damaged(self, name: str) -> Outcome:
        absent = self._absent(name)
        if absent is None:
            self.sessions[name].state = "damaged"
        return absent or ("done",)

    def _absent(self, name: str) -> Outcome | None:
        if name not in self.sessions:
            return MISSING
        return DELETED if self.sessions[name].state == "deleted" else None

    def _unwritable(self, name: str) -> Outcome | None:
        absent = self._absent(name)
        if absent is not None:
            return absent
        return DAMAGED if self.sessions[name].state == "damaged" else None
