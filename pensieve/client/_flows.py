"""The SDK's operations as flows, without any I/O.

A *flow* is a generator that yields ``Invoke`` and ``Sleep`` steps and returns a value. A shell performs each
step, then sends the response into the flow or throws the call's ``PensieveError`` into it. Both clients run the
same flows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from pensieve.client import _requests, decode
from pensieve.client._requests import InputLike
from pensieve.client._retry import Backoff
from pensieve.client._steps import Flow, Invoke, Tries, call
from pensieve.client._transport import ClientSettings
from pensieve.client._turn_machine import TurnMachine
from pensieve.client._values import (
    Compaction,
    FoundTurn,
    Item,
    Role,
    ServerInfo,
    SessionInfo,
    TenantTotals,
    TokenCount,
    Turn,
    TurnState,
    Warming,
)
from pensieve.client.arguments import UUID_PATTERN
from pensieve.client.arguments import request_id as make_id
from pensieve.errors import InvalidArgument, NotFound, PensieveError
from pensieve.v1 import pensieve_pb2 as pb

PAGE = 500
ABANDONED_KEPT = 16


def server_info(settings: ClientSettings) -> Flow[ServerInfo]:
    response = yield from call(settings, "GetServerInfo", pb.GetServerInfoRequest())
    return decode.server_info(response)


def usage(settings: ClientSettings) -> Flow[TenantTotals]:
    response = yield from call(settings, "GetUsage", pb.GetUsageRequest())
    return decode.usage_totals(response)


def list_sessions(
    settings: ClientSettings, labels: Mapping[str, str] | None, limit: int | None
) -> Flow[list[SessionInfo]]:
    found: list[SessionInfo] = []
    request = pb.ListSessionsRequest(label_selector=",".join(f"{k}={v}" for k, v in (labels or {}).items()))
    while limit is None or len(found) < limit:
        request.page_size = PAGE if limit is None else min(PAGE, limit - len(found))
        response = yield from call(settings, "ListSessions", request)
        found.extend(decode.session(one) for one in response.sessions)
        request.page_token = response.next_page_token
        if not request.page_token:
            break
    return found


def create_session(settings: ClientSettings, request: pb.CreateSessionRequest) -> Flow[SessionInfo]:
    response = yield from call(settings, "CreateSession", request)
    return decode.session(response.session)


def import_session(
    settings: ClientSettings, requests: tuple[pb.ImportSessionRequest, ...]
) -> Flow[SessionInfo]:
    response = yield from call(settings, "ImportSession", requests)
    return decode.session(response.session)


def find_turn(
    settings: ClientSettings, mark: str, answer: str | None, request_id: str | None
) -> Flow[FoundTurn | None]:
    if request_id is not None and not UUID_PATTERN.fullmatch(request_id):
        raise InvalidArgument.field(
            "request_id", "must be a UUID here: a name stands for a different UUID in each session"
        )
    request = pb.FindTurnRequest(mark=mark, answer=answer, request_id=request_id)
    try:
        response = yield from call(settings, "FindTurn", request)
    except NotFound:
        return None
    return FoundTurn(decode.turn(response.turn), response.candidate)


def claim(
    settings: ClientSettings, request_id: str, session: str, fingerprint: str, plan: str
) -> Flow[tuple[str, str]]:
    request = pb.ClaimRequestIdRequest(
        request_id=request_id, session=_requests.session_name(session), fingerprint=fingerprint, plan=plan
    )
    response = yield from call(settings, "ClaimRequestId", request)
    return response.session.removeprefix("sessions/"), response.plan


def release_claim(settings: ClientSettings, request_id: str, session: str) -> Flow[None]:
    request = pb.ClaimRequestIdRequest(
        request_id=request_id, session=_requests.session_name(session), refused=True
    )
    yield from call(settings, "ClaimRequestId", request)


class SessionCore:
    """State and operations of a session handle."""

    def __init__(self, settings: ClientSettings, name: str, info: SessionInfo | None = None) -> None:
        self.settings = settings
        self.name = name
        self.info = info
        self.last_turn: Turn | None = None
        self.running: str | None = None
        """Request id of the handle's newest turn that has not ended."""
        self.running_stream = ""
        """Id of the stream that follows it."""
        self.abandoned: list[str] = []

    @property
    def revision(self) -> int | None:
        """Newest revision that this handle has seen."""
        seen = [state.revision for state in (self.info, self.last_turn) if state is not None]
        return max(seen, default=None)

    def call(self, method: str, request: Message, *, replay: bool = True) -> Flow[Any]:
        return call(self.settings, method, request, session=self.name, replay=replay)

    # -- turns

    def turn_machine(
        self,
        text: str | None,
        tokens: Sequence[int] | None,
        items: Sequence[InputLike] | None,
        options: Mapping[str, Any],
    ) -> TurnMachine:
        """Build a new turn without sending it. ``timeout`` counts from here."""
        options = {name: value for name, value in options.items() if value is not None}  # None: not given
        timeout = options.pop("timeout", None)
        wait_if_busy = options.pop("wait_if_busy", False)
        request = _requests.stream_turn(self.name, _requests.turn_input(text, tokens, items), options)
        if self.revision is not None:
            # Not an expected revision: other handles may change the session, but the store must not go back in time.
            request.turn.known_revision = self.revision
        return self._machine(request, timeout, wait_if_busy)

    def attach_machine(
        self, request_id: str, timeout: float | None, max_chunk_tokens: int | None
    ) -> TurnMachine:
        """Follow an existing turn from its first token."""
        request_id = make_id(self.name, request_id)
        output = pb.OutputOptions(max_chunk_tokens=max_chunk_tokens)
        request = pb.StreamTurnRequest(
            session=self.name, turn=pb.TurnSpec(request_id=request_id, output=output), attach_only=True
        )
        # The caller that started the turn decides when it ends. A second reader that leaves must not end it.
        request.on_disconnect = pb.DISCONNECT_POLICY_FINISH
        return self._machine(request, timeout, False)

    def _machine(
        self, request: pb.StreamTurnRequest, timeout: float | None, wait_if_busy: bool
    ) -> TurnMachine:
        return TurnMachine(
            request,
            backoff=Backoff(self.settings.retry),
            timeout=timeout,
            wait_if_busy=wait_if_busy,
            abandoned=self.abandoned,
        )

    def on_turn_end(self, machine: TurnMachine) -> None:
        if self.running == machine.request_id:
            self.running = None
        if machine.turn is not None and machine.turn.state is TurnState.COMMITTED:
            self.last_turn = machine.turn
            # Another server may have reported the end while the turn's own server cannot reach the store.
            self.abandon(machine.request_id)

    def abandon(self, request_id: str) -> None:
        """Note that this turn is over or left by the caller. A new turn may still meet it for a moment."""
        self.abandoned.append(request_id)
        del self.abandoned[:-ABANDONED_KEPT]

    def get_turn(self, request_id: str) -> Flow[Turn]:
        request = pb.GetTurnRequest(session=self.name, request_id=make_id(self.name, request_id))
        response = yield from self.call("GetTurn", request)
        return decode.turn(response.turn)

    def cancel(
        self, request_id: str | None, keep: str, keep_output_tokens: int | None, stream_id: str = ""
    ) -> Flow[Turn]:
        found = self.running if request_id is None else make_id(self.name, request_id)
        if found is None:
            info = yield from self.refresh()
            found = info.active_request_id
        if not found:
            raise NotFound("no turn is running in this session", reason="TURN_NOT_FOUND")
        stream_id = stream_id or (self.running_stream if found == self.running else "")
        request = _requests.cancel_turn(self.name, found, keep, keep_output_tokens, stream_id)
        response = yield from self.call("CancelTurn", request)
        return decode.turn(response.turn)

    def choose(self, turn: Turn | str, candidate: int, expected_revision: int | None) -> Flow[Turn]:
        request = _requests.choose_candidate(self.name, turn, candidate, expected_revision)
        response = yield from self.call("ChooseCandidate", request)
        chosen = decode.turn(response.turn)
        if self.last_turn is not None and self.last_turn.request_id == chosen.request_id:
            self.last_turn = chosen
        return chosen

    def last_user_item(self) -> Flow[tuple[int, int]]:
        """Return the number of the newest USER item and the revision at which it was seen.

        Raises NotFound (ITEM_NOT_FOUND).
        """
        starts = [0]
        if self.last_turn is not None and self.last_turn.input:
            starts.insert(
                0, self.last_turn.input[0].item - 1
            )  # Saves reading the pages before the last known turn.
        for start in starts:
            items, revision = yield from self._items(False, start)
            for item in reversed(items):
                if item.role == Role.USER:
                    return item.item, revision
        raise NotFound("the session has no user item", reason="ITEM_NOT_FOUND")

    # -- history

    def items(self, include_tokens: bool, after_item: int, limit: int | None = None) -> Flow[list[Item]]:
        items, _ = yield from self._items(include_tokens, after_item, limit)
        return items

    def _items(
        self, include_tokens: bool, after_item: int, limit: int | None = None
    ) -> Flow[tuple[list[Item], int]]:
        found: list[Item] = []
        request = pb.ListItemsRequest(
            name=self.name,
            page_size=PAGE if limit is None else min(limit, PAGE),
            include_tokens=include_tokens,
            after_item=after_item or None,
        )
        while True:
            response = yield from self.call("ListItems", request)
            found.extend(decode.item(one) for one in response.items)
            if not response.next_page_token or (limit is not None and len(found) >= limit):
                return found[:limit], response.revision
            request.page_token = response.next_page_token

    def append(
        self,
        items: Sequence[InputLike],
        followed_by: Sequence[Role],
        expected_revision: int | None,
        request_id: str | None,
    ) -> Flow[tuple[Item, ...]]:
        request = pb.AppendItemsRequest(
            name=self.name,
            request_id=make_id(self.name, request_id),
            items=[_requests.input_item(item) for item in items],
            followed_by=[_requests.role_name(role) for role in followed_by],
            expected_revision=expected_revision,
        )
        response = yield from self.call("AppendItems", request)
        self._update_info(response.session)
        return tuple(decode.item(message) for message in response.items)

    def rewind(
        self, to_item: int, expected_revision: int | None, request_id: str | None, *, erase: bool = False
    ) -> Flow[SessionInfo]:
        request = pb.RewindSessionRequest(
            name=self.name,
            request_id=make_id(self.name, request_id),
            item=to_item,
            erase=erase,
            expected_revision=expected_revision,
        )
        response = yield from self.call("RewindSession", request)
        return self._update_info(response.session)

    def fork(
        self,
        item: int | None,
        session_id: str | None,
        expected_revision: int | None,
        request_id: str | None,
        candidate: int | None,
        ttl: float | None,
    ) -> Flow[SessionInfo]:
        request = pb.ForkSessionRequest(
            name=self.name,
            request_id=make_id(self.name, request_id),
            item=item,
            session_id=session_id or "",
            expected_revision=expected_revision,
            candidate=candidate,
        )
        _requests.set_field(request, "ttl", ttl)
        response = yield from self.call("ForkSession", request)
        return decode.session(response.session)

    # -- the session itself

    def refresh(self, residency: bool = False) -> Flow[SessionInfo]:
        view = pb.SESSION_VIEW_FULL if residency else pb.SESSION_VIEW_BASIC
        response = yield from self.call("GetSession", pb.GetSessionRequest(name=self.name, view=view))
        return self._update_info(response.session)

    def warm(self) -> Flow[Warming]:
        request = pb.WarmSessionRequest(session=self.name)
        return decode.warming((yield from self.call("WarmSession", request, replay=False)))

    def compact(self, request: pb.CompactSessionRequest) -> Flow[Compaction]:
        response = yield from self.call("CompactSession", request)
        self._update_info(response.session)
        return decode.compaction(response)

    def update(self, changes: Mapping[str, Any], expected_revision: int | None) -> Flow[SessionInfo]:
        """``changes``: the given keyword arguments of ``Session.update``."""
        session = pb.Session(
            name=self.name,
            labels=changes.get("labels") or {},
            config=_requests.session_config(changes),
        )
        request = pb.UpdateSessionRequest(
            name=self.name,
            session=session,
            expected_revision=expected_revision,
            rebind=changes.get("rebind", False),
        )
        request.update_mask.paths.extend(filter(None, map(_requests.UPDATE_PATHS.__getitem__, changes)))
        # With an expected revision, a retry of an update that had succeeded would be refused.
        response = yield from self.call("UpdateSession", request, replay=expected_revision is None)
        return self._update_info(response.session)

    def delete(
        self, expected_revision: int | None, allow_missing: bool, unused_only: bool, keep_cached: bool
    ) -> Flow[None]:
        request = pb.DeleteSessionRequest(
            name=self.name,
            expected_revision=expected_revision,
            allow_missing=allow_missing,
            unused_only=unused_only,
            keep_cached=keep_cached,
        )
        gone = "SESSION_NOT_FOUND" if unused_only else "SESSION_DELETED"
        tries, tried = Tries(self.settings), False
        while True:
            try:
                yield Invoke("DeleteSession", request, self.name, tries.remaining_s)
                return
            except NotFound as error:
                if tried and error.reason == gone:
                    return  # An earlier try, whose response was lost, deleted it.
                raise
            except PensieveError as error:
                pause = tries.wait_after(error)
            tried = True
            yield pause

    def count_tokens(
        self, text: str | None, tokens: Sequence[int] | None, items: Sequence[InputLike] | None
    ) -> Flow[TokenCount]:
        request = pb.CountTokensRequest(session=self.name, input=_requests.turn_input(text, tokens, items))
        response = yield from self.call("CountTokens", request)
        return decode.token_count(response)

    def _update_info(self, message: pb.Session) -> SessionInfo:
        info = decode.session(message)
        self.info = info
        return info
