"""The asyncio client: the names of the blocking one, with ``await``. Belongs to the event loop of its first call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from pensieve.client import _exports, _flows, _requests, decode
from pensieve.client._aio_link import AsyncLink, AsyncTurnStream
from pensieve.client._requests import InputLike
from pensieve.client._retry import RetryPolicy, retry_policy
from pensieve.client._transport import ClientSettings
from pensieve.client._values import (
    Compaction,
    ErasedSession,
    ErasureReceipt,
    FoundTurn,
    Item,
    Role,
    ServerInfo,
    SessionInfo,
    TenantTotals,
    TokenCount,
    Turn,
    Warming,
)
from pensieve.client._view import SessionView
from pensieve.client.arguments import (
    CHANGE_KEYS,
    TURN_KEYS,
    Keep,
    Overflow,
    SessionChanges,
    Tools,
    TurnOptions,
    check_names,
    with_options,
)
from pensieve.client.arguments import request_id as make_id
from pensieve.core import SamplingOptions
from pensieve.errors import Internal, InvalidArgument
from pensieve.v1 import pensieve_pb2 as pb


class AsyncClient:
    """A connection to a Pensieve server. Use it as a context manager, or call ``close``.

    * ``target``: ``HOST:PORT``.
    * ``api_key``: sent as a bearer token.
    * ``tls``: TLS with the system's root certificates; ``credentials``: TLS with others, or the PEM
      file of a certificate and its private key, which this client shows.
    * ``timeout``: seconds for each call that is not a turn, retries included. A turn has its own ``timeout``.
    * ``metadata``: sent with every call, for proxies before the server; ``options``: more gRPC channel options.

    If the server is unavailable or overloaded, the client retries for ``retry_for`` seconds in a row (default
    60; 0: never), with growing random waits and at least the delay that the server asks for. No change is
    applied twice. ``retry`` sets further details.
    """

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        tls: bool = False,
        credentials: grpc.ChannelCredentials | Path | None = None,
        timeout: float = 60.0,
        retry_for: float | None = None,
        retry: RetryPolicy | None = None,
        options: Sequence[tuple[str, Any]] = (),
        metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> None:
        settings = ClientSettings(
            target, api_key, tls, credentials, timeout, retry_policy(retry, retry_for), options, metadata
        )
        self._link = AsyncLink(settings)

    @with_options(SamplingOptions)
    async def create_session(
        self,
        *,
        system_prompt: str | None = None,
        session_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        ttl: float | None = None,
        model: str | None = None,
        overflow: Overflow | None = None,
        share_prefixes: bool | None = None,
        tools: Tools | None = None,
        subject: str | None = None,
        summary: str | None = None,
        compact_at: int | None = None,
        keep_turns: int | None = None,
        default_sampling: SamplingOptions | None = None,
        initial_items: Sequence[InputLike] = (),
        followed_by: Sequence[Role] = (),
        request_id: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncSession:
        """Create a session. Sampling keywords become its defaults.

        * ``system_prompt``: instructions that come before the conversation.
        * ``session_id``: 3 to 63 lower-case letters, digits and hyphens; default: the server chooses one.
        * ``labels``: key-value pairs by which ``sessions`` finds the session.
        * ``ttl``: seconds without use after which the session is erased.
        * ``model``: must name the model that the server runs; default: any.
        * ``overflow``: ``reject`` a turn that does not fit the context, or ``drop_oldest_turns`` from the context.
        * ``tools``: functions that the model may call.
        * ``subject``: the person whom the session is about, for ``erase_subject`` and ``export_subject``.
        * ``compact_at``: tokens of context from which on the server compacts the session after a turn.
          ``keep_turns``: turns that stay as they are then (2).
        * ``summary``: stands behind the system prompt for turns before the transcript, as after ``compact``.
        * ``initial_items``: a transcript to import. ``followed_by``: roles of the first turn's input, for chat
          templates whose output depends on the item after an answer.
        * ``share_prefixes=False``: share no cached state with other sessions.
        * ``request_id``: idempotency key; repeating the call with it creates no second session.

        Raises AlreadyExists if another session has the ``session_id``.
        """
        config = _requests.session_config(
            {
                "model": model,
                "system_prompt": system_prompt,
                "ttl": ttl,
                "overflow": overflow,
                "share_prefixes": share_prefixes,
                "tools": tools,
                "subject": subject,
                "summary": summary,
                "compact_at": compact_at,
                "keep_turns": keep_turns,
                "default_sampling": {**(default_sampling or {}), **sampling},
            }
        )
        request = _requests.new_session(
            config,
            session_id=session_id,
            labels=labels,
            initial_items=initial_items,
            followed_by=followed_by,
            request_id=request_id,
        )
        info = await self._link.run(_flows.create_session(self._link.settings, request))
        return AsyncSession(self._link, info.name, info)

    def session(self, name_or_id: str) -> AsyncSession:
        """Return a handle on an existing session, without a call. Later calls report a missing session."""
        return AsyncSession(self._link, name_or_id)

    async def sessions(
        self, *, labels: Mapping[str, str] | None = None, limit: int | None = None
    ) -> list[SessionInfo]:
        """List the sessions that have all these labels, newest first. Eventually consistent."""
        return await self._link.run(_flows.list_sessions(self._link.settings, labels, limit))

    async def find_turn(
        self, mark: str, answer: str | None = None, *, request_id: str | None = None
    ) -> FoundTurn | None:
        """Return the newest turn, in any session, with this ``mark`` and this answer (default: any); or None.

        If several match, prefer the one whose session has the turn ``request_id``.
        """
        return await self._link.run(_flows.find_turn(self._link.settings, mark, answer, request_id))

    async def erase_subject(
        self, subject: str, *, on_session: Callable[[ErasedSession], object] | None = None
    ) -> ErasureReceipt:
        """Erase every session about a person, their forks included, and return a receipt.

        ``on_session`` is called with each session once it is erased. Not retried: after an error, the sessions that it
        was not called for may still be there; repeat the call. Needs the scope ``erase``.
        """
        erased = list[ErasedSession]()
        request = pb.EraseSubjectRequest(subject=subject)
        async for message in self._link.stream("EraseSubject", request):
            if message.HasField("completed"):
                return decode.erasure(message.completed, erased)
            erased.append(decode.erased_session(message.session))
            if on_session is not None:
                on_session(erased[-1])
        raise Internal("the server ended the erasure without a receipt: repeat the call")

    def export_subject(self, subject: str) -> AsyncIterator[bytes]:
        """Iterate over everything that is stored in sessions about a person, as JSON lines. Not retried."""
        return self._link.lines("ExportSubject", pb.ExportSubjectRequest(subject=subject))

    async def import_sessions(
        self, lines: Iterable[bytes], *, session_id: str | None = None, new_ids: bool = False
    ) -> list[AsyncSession]:
        """Create the sessions of a whole export, such as an open file, with their live history.

        They keep their ids, or get ``session_id`` (of an export of one session) or, with ``new_ids``, new ones. The
        same lines again return the same sessions. Raises InvalidArgument if the export was cut short, before it
        imports anything, and AlreadyExists (SESSION_EXISTS) for an id that is taken.
        """
        exported = _exports.divide(lines)
        if session_id is not None and len(exported) != 1:
            raise InvalidArgument.field("session_id", f"is for one session, the export has {len(exported)}")
        requests = [_exports.import_requests(one, session_id, new_id=new_ids) for one in exported]
        infos = [await self._link.run(_flows.import_session(self._link.settings, one)) for one in requests]
        return [AsyncSession(self._link, info.name, info) for info in infos]

    async def server_info(self) -> ServerInfo:
        return await self._link.run(_flows.server_info(self._link.settings))

    async def usage(self) -> TenantTotals:
        """Return the usage of the caller's tenant: this server, its cache and the history store."""
        return await self._link.run(_flows.usage(self._link.settings))

    async def close(self) -> None:
        """Close all streams and calls. Idempotent."""
        await self._link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncSession(SessionView):
    """One conversation. Handles are cheap and independent of each other."""

    def __init__(self, link: AsyncLink, name_or_id: str, info: SessionInfo | None = None) -> None:
        super().__init__(link.settings, name_or_id, info)
        self._link = link

    @with_options(TurnOptions)
    def stream(
        self,
        text: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        items: Sequence[InputLike] | None = None,
        **options: Unpack[TurnOptions],
    ) -> AsyncTurnStream:
        """Run one turn and return its stream of pieces. It is sent when the first piece is requested.

        Leaving the loop early cancels the turn: the server discards it, and history keeps nothing of it unless
        it was already committed. To keep the answer so far, call ``await stream.cancel()``. To let the turn
        continue, pass ``on_disconnect="finish"``.
        """
        machine = self._core.turn_machine(text, tokens, items, options)
        return AsyncTurnStream(self._link, self._core, machine)

    @with_options(TurnOptions)
    async def send(
        self,
        text: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        items: Sequence[InputLike] | None = None,
        **options: Unpack[TurnOptions],
    ) -> Turn:
        """Run one turn and return it when it is complete."""
        return await self.stream(text, tokens=tokens, items=items, **options).finish()

    @with_options(TurnOptions)
    async def regenerate(self, **options: Unpack[TurnOptions]) -> Turn:
        """Generate another answer to the newest user item. The old answer stays until the new one is committed."""
        check_names(options, TURN_KEYS)  # before any call
        item, revision = await self._link.run(self._core.last_user_item())
        options.setdefault("expected_revision", revision)
        options["replace_after_item"] = item
        return await self.send(**options)

    @with_options(TurnOptions)
    async def edit(self, item: int, text: str, **options: Unpack[TurnOptions]) -> Turn:
        """Replace item number ``item`` and all later ones by ``text`` and a new answer."""
        options["replace_after_item"] = item - 1
        return await self.send(text, **options)

    def attach(
        self, request_id: str, *, timeout: float | None = None, max_chunk_tokens: int | None = None
    ) -> AsyncTurnStream:
        """Follow a turn that another caller started, from its first token. Leaving does not end it."""
        machine = self._core.attach_machine(request_id, timeout, max_chunk_tokens)
        return AsyncTurnStream(self._link, self._core, machine)

    async def get_turn(self, request_id: str) -> Turn:
        """Return a turn's state and result."""
        return await self._link.run(self._core.get_turn(request_id))

    async def cancel(
        self,
        request_id: str | None = None,
        *,
        keep: Keep = "partial",
        keep_output_tokens: int | None = None,
    ) -> Turn:
        """Stop a turn (default: the running one) and return it as history has it now.

        ``keep="partial"`` commits the input and the answer so far, or its first ``keep_output_tokens`` tokens.
        ``keep="nothing"`` discards the turn.
        """
        return await self._link.run(self._core.cancel(request_id, keep, keep_output_tokens))

    async def choose(self, turn: Turn | str, candidate: int, *, expected_revision: int | None = None) -> Turn:
        """Make another candidate of the latest turn its answer. ``turn``: the turn or its request id.

        Choosing the current answer changes nothing. Raises FailedPrecondition (TURN_NOT_LATEST) if the session
        has changed since, NotFound (CANDIDATE_NOT_FOUND) if the turn has no such candidate.
        """
        return await self._link.run(self._core.choose(turn, candidate, expected_revision))

    async def last_user_item(self) -> int:
        """Return the number of the newest user item. Raises NotFound (ITEM_NOT_FOUND) if there is none."""
        item, _ = await self._link.run(self._core.last_user_item())
        return item

    async def items(
        self, *, include_tokens: bool = False, after_item: int = 0, limit: int | None = None
    ) -> list[Item]:
        """List the live history at one revision, oldest first. ``limit``: most items, at least 1."""
        return await self._link.run(self._core.items(include_tokens, after_item, limit))

    async def append(
        self,
        items: Sequence[InputLike],
        *,
        followed_by: Sequence[Role] = (),
        expected_revision: int | None = None,
        request_id: str | None = None,
    ) -> tuple[Item, ...]:
        """Append items to the history without a turn, and return them as stored."""
        return await self._link.run(self._core.append(items, followed_by, expected_revision, request_id))

    async def rewind(
        self,
        *,
        to_item: int,
        erase: bool = False,
        expected_revision: int | None = None,
        request_id: str | None = None,
    ) -> SessionInfo:
        """Drop all items after ``to_item``. With ``erase`` they can no longer be read."""
        return await self._link.run(self._core.rewind(to_item, expected_revision, request_id, erase=erase))

    async def fork(
        self,
        item: int | None = None,
        *,
        session_id: str | None = None,
        expected_revision: int | None = None,
        request_id: str | None = None,
        candidate: int | None = None,
        ttl: float | None = None,
    ) -> AsyncSession:
        """Create a session with the history up to ``item`` (default: all of it).

        If ``item`` is a turn's answer, ``candidate`` ends the copy with another candidate of that turn.
        ``ttl``: seconds without use after which the copy is erased, 0 for never; by default those of this session.
        """
        info = await self._link.run(
            self._core.fork(item, session_id, expected_revision, request_id, candidate, ttl)
        )
        return AsyncSession(self._link, info.name, info)

    async def compact(
        self,
        *,
        keep_turns: int = 2,
        instruction: str | None = None,
        max_summary_tokens: int | None = None,
        expected_revision: int | None = None,
        request_id: str | None = None,
    ) -> Compaction:
        """Replace all turns but the last ``keep_turns`` by a summary that the model writes of the conversation.

        The whole history stays in a fork. ``instruction`` asks for the summary in other words. The client's ``timeout``
        must suffice for ``max_summary_tokens`` (512). Until the call succeeds, the session is as before. Raises
        FailedPrecondition (NOTHING_TO_COMPACT, SUMMARY_EMPTY), and RevisionMismatch if the session changes meanwhile.
        """
        request = pb.CompactSessionRequest(
            name=self.name,
            request_id=make_id(self.name, request_id),
            keep_turns=keep_turns,
            instruction=instruction or "",
            max_summary_tokens=max_summary_tokens,
            expected_revision=expected_revision,
        )
        return await self._link.run(self._core.compact(request))

    async def refresh(self, *, residency: bool = False) -> SessionInfo:
        """Read the metadata again. ``residency`` adds where the KV-tokens are."""
        return await self._link.run(self._core.refresh(residency))

    async def warm(self) -> Warming:
        """Ask the server to bring the session's cached state to the device, as when its user begins to type.

        Missing state is copied or computed if there is room and time. Tried once; the next turn is correct
        either way.
        """
        return await self._link.run(self._core.warm())

    @with_options(SessionChanges)
    async def update(
        self, *, expected_revision: int | None = None, **changes: Unpack[SessionChanges]
    ) -> SessionInfo:
        """Change the given settings only. A new system prompt invalidates all cached state."""
        check_names(changes, CHANGE_KEYS)
        return await self._link.run(self._core.update(changes, expected_revision))

    async def rebind(self, *, expected_revision: int | None = None) -> SessionInfo:
        """Move the session to the model that the server runs, after a turn was refused with MODEL_MISMATCH.

        If the tokenizer differs, all items are tokenized again from their texts and renumbered. Raises
        FailedPrecondition (MODEL_MISMATCH) if some were given as token ids.
        """
        return await self.update(rebind=True, expected_revision=expected_revision)

    async def delete(
        self,
        *,
        expected_revision: int | None = None,
        allow_missing: bool = False,
        unused_only: bool = False,
        keep_cached: bool = False,
    ) -> None:
        """Erase the conversation at once. Its id is reserved for 30 days.

        ``unused_only``: erase only a session that has never had a turn, and free its id at once. Raises
        FailedPrecondition (SESSION_USED) if it has had one, TurnInProgress while one runs.

        ``keep_cached``: leave the cached state in memory until its room is needed, for sessions that begin in the
        same way. No effect for a session with a subject.
        """
        await self._link.run(self._core.delete(expected_revision, allow_missing, unused_only, keep_cached))

    def export(self) -> AsyncIterator[bytes]:
        """Iterate over everything that is stored of the session, as JSON lines. Not retried."""
        return self._link.lines("ExportSession", pb.ExportSessionRequest(name=self.name), self.name)

    async def count_tokens(
        self,
        text: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        items: Sequence[InputLike] | None = None,
    ) -> TokenCount:
        """Return the token counts of this input, without running the model."""
        return await self._link.run(self._core.count_tokens(text, tokens, items))
