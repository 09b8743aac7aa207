# Generated from _aio.py by `make twin`. Do not edit.
"""The blocking client. Thread-safe, except that one turn stream belongs to one reading thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from pensieve.client import _flows, _requests
from pensieve.client._requests import InputLike
from pensieve.client._retry import RetryPolicy, retry_policy
from pensieve.client._sync_link import Link, TurnStream
from pensieve.client._transport import ClientSettings
from pensieve.client._values import (
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
from pensieve.core import SamplingOptions


class Client:
    """A connection to a Pensieve server. Use it as a context manager, or call ``close``.

    ``target`` is ``HOST:PORT``. ``api_key`` goes out as a bearer token. ``tls`` uses the system's roots,
    ``credentials`` is for anything else. ``metadata`` goes out with every call, for what stands before the server;
    ``options`` are more of gRPC's channel options.
    ``timeout``, in seconds, bounds every call that is not a turn, with all its tries; a turn has its own ``timeout``.

    A server that is away or busy is asked again, for ``retry_for`` seconds in a row (default 60; 0: not at all),
    after growing random waits and what the server asks for. Nothing happens twice by that. ``retry`` sets more of it.
    """

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        tls: bool = False,
        credentials: grpc.ChannelCredentials | None = None,
        timeout: float = 60.0,
        retry_for: float | None = None,
        retry: RetryPolicy | None = None,
        options: Sequence[tuple[str, Any]] = (),
        metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> None:
        settings = ClientSettings(
            target, api_key, tls, credentials, timeout, retry_policy(retry, retry_for), options, metadata
        )
        self._link = Link(settings)

    @with_options(SamplingOptions)
    def create_session(
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
        default_sampling: SamplingOptions | None = None,
        initial_items: Sequence[InputLike] = (),
        followed_by: Sequence[Role] = (),
        request_id: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Session:
        """A new conversation. Sampling keywords become the session's defaults.

        ``system_prompt``: what the model is told first. ``session_id``: lower-case letters, digits and hyphens, 3 to
        63; left out: the server makes one. ``labels``: to find it by, with ``sessions``. ``ttl``: seconds without use
        after which it is erased. ``overflow``: what happens to a turn that does not fit the context. ``tools``:
        functions that the model may call. ``initial_items`` imports a transcript; ``followed_by``: the roles of what
        its first turn gives, for chat templates that look at what follows an answer. ``share_prefixes=False``: its
        cached state is never used by another session, nor that of another by it. ``request_id``: the same one makes no
        second session.

        Raises AlreadyExists when ``session_id`` is taken by another session.
        """
        config = _requests.session_config(
            {
                "model": model,
                "system_prompt": system_prompt,
                "ttl": ttl,
                "overflow": overflow,
                "share_prefixes": share_prefixes,
                "tools": tools,
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
        info = self._link.run(_flows.create_session(self._link.settings, request))
        return Session(self._link, info.name, info)

    def session(self, name_or_id: str) -> Session:
        """A handle on an existing session. Makes no call: a session that is not there is found out later."""
        return Session(self._link, name_or_id)

    def sessions(
        self, *, labels: Mapping[str, str] | None = None, limit: int | None = None
    ) -> list[SessionInfo]:
        """Sessions with all these labels, newest first, eventually consistent."""
        return self._link.run(_flows.list_sessions(self._link.settings, labels, limit))

    def find_turn(
        self, mark: str, answer: str | None = None, *, request_id: str | None = None
    ) -> FoundTurn | None:
        """The newest turn, in any session, with this ``mark`` and this answer, or any; None: there is none.

        Of several, the one in whose session ``request_id`` has a turn goes first.
        """
        return self._link.run(_flows.find_turn(self._link.settings, mark, answer, request_id))

    def server_info(self) -> ServerInfo:
        return self._link.run(_flows.server_info(self._link.settings))

    def usage(self) -> TenantTotals:
        """What the caller's tenant uses of this server, its cache and the history store."""
        return self._link.run(_flows.usage(self._link.settings))

    def close(self) -> None:
        """End all streams and calls. Idempotent."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Session(SessionView):
    """One conversation. Handles are cheap and independent of each other."""

    def __init__(self, link: Link, name_or_id: str, info: SessionInfo | None = None) -> None:
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
    ) -> TurnStream:
        """One turn, piece by piece; sent when the first piece is asked for.

        Leaving the loop early cancels the turn: the server is told to discard it, nothing of it stays in history
        unless all of it was there before.
        To keep what was said so far call ``stream.cancel()``. To let it run on, pass ``on_disconnect="finish"``.
        """
        machine = self._core.turn_machine(text, tokens, items, options)
        return TurnStream(self._link, self._core, machine)

    @with_options(TurnOptions)
    def send(
        self,
        text: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        items: Sequence[InputLike] | None = None,
        **options: Unpack[TurnOptions],
    ) -> Turn:
        """One whole turn."""
        return self.stream(text, tokens=tokens, items=items, **options).finish()

    @with_options(TurnOptions)
    def regenerate(self, **options: Unpack[TurnOptions]) -> Turn:
        """Another answer to the newest user item. The old answer stays until the new one is committed."""
        check_names(options, TURN_KEYS)  # before anything is asked
        item, revision = self._link.run(self._core.last_user_item())
        options.setdefault("expected_revision", revision)
        options["replace_after_item"] = item
        return self.send(**options)

    @with_options(TurnOptions)
    def edit(self, item: int, text: str, **options: Unpack[TurnOptions]) -> Turn:
        """Replace item number ``item`` and everything after it by ``text`` and a new answer."""
        options["replace_after_item"] = item - 1
        return self.send(text, **options)

    def attach(
        self, request_id: str, *, timeout: float | None = None, max_chunk_tokens: int | None = None
    ) -> TurnStream:
        """Follow a turn that was started elsewhere, from its first token; leaving does not end it."""
        machine = self._core.attach_machine(request_id, timeout, max_chunk_tokens)
        return TurnStream(self._link, self._core, machine)

    def get_turn(self, request_id: str) -> Turn:
        """State and result of a turn."""
        return self._link.run(self._core.get_turn(request_id))

    def cancel(
        self,
        request_id: str | None = None,
        *,
        keep: Keep = "partial",
        keep_output_tokens: int | None = None,
    ) -> Turn:
        """Stop a turn (default: the one that runs) and say what stands in history afterwards.

        ``partial`` commits the input and the answer so far, or its first ``keep_output_tokens``.
        """
        return self._link.run(self._core.cancel(request_id, keep, keep_output_tokens))

    def choose(self, turn: Turn | str, candidate: int, *, expected_revision: int | None = None) -> Turn:
        """Make another candidate of the latest turn (or of its request id) its answer.

        Choosing the chosen one changes nothing. Raises FailedPrecondition (TURN_NOT_LATEST) once the session has
        changed, NotFound (CANDIDATE_NOT_FOUND) for a number that the turn did not keep.
        """
        return self._link.run(self._core.choose(turn, candidate, expected_revision))

    def last_user_item(self) -> int:
        """Number of the newest user item. Raises NotFound (ITEM_NOT_FOUND) when there is none."""
        item, _ = self._link.run(self._core.last_user_item())
        return item

    def items(
        self, *, include_tokens: bool = False, after_item: int = 0, limit: int | None = None
    ) -> list[Item]:
        """The live history, oldest first, all from one revision; at most ``limit`` items, 1 or more."""
        return self._link.run(self._core.items(include_tokens, after_item, limit))

    def append(
        self,
        items: Sequence[InputLike],
        *,
        followed_by: Sequence[Role] = (),
        expected_revision: int | None = None,
        request_id: str | None = None,
    ) -> tuple[Item, ...]:
        """Add items behind the history without a turn, as ``create_session`` imports them; as they are in it."""
        return self._link.run(self._core.append(items, followed_by, expected_revision, request_id))

    def rewind(
        self,
        *,
        to_item: int,
        erase: bool = False,
        expected_revision: int | None = None,
        request_id: str | None = None,
    ) -> SessionInfo:
        """Drop everything after item ``to_item``; with ``erase`` nothing of it can be read any more."""
        return self._link.run(self._core.rewind(to_item, expected_revision, request_id, erase=erase))

    def fork(
        self,
        item: int | None = None,
        *,
        session_id: str | None = None,
        expected_revision: int | None = None,
        request_id: str | None = None,
        candidate: int | None = None,
    ) -> Session:
        """A new session with the history up to ``item`` (default: all of it).

        If that is a turn's answer, ``candidate`` makes another one of the turn the end of the copy.
        """
        info = self._link.run(self._core.fork(item, session_id, expected_revision, request_id, candidate))
        return Session(self._link, info.name, info)

    def refresh(self, *, residency: bool = False) -> SessionInfo:
        """Read the metadata again; ``residency`` adds where the KV-tokens lie."""
        return self._link.run(self._core.refresh(residency))

    def warm(self) -> Warming:
        """Ask for the session's cached state on the device, as when its user begins to type. Tried once: it is a wish.

        What is missing is copied or computed if there is room and time; the next turn is right either way.
        """
        return self._link.run(self._core.warm())

    @with_options(SessionChanges)
    def update(
        self, *, expected_revision: int | None = None, **changes: Unpack[SessionChanges]
    ) -> SessionInfo:
        """Change what is given, and nothing else. A changed system prompt makes all cached state useless."""
        check_names(changes, CHANGE_KEYS)
        return self._link.run(self._core.update(changes, expected_revision))

    def rebind(self, *, expected_revision: int | None = None) -> SessionInfo:
        """Move the session to the model that is served, after a turn was refused with MODEL_MISMATCH.

        Where the tokenizer is another, all items are made anew from their texts and renumbered. Raises
        FailedPrecondition (MODEL_MISMATCH) when some were given as token ids.
        """
        return self.update(rebind=True, expected_revision=expected_revision)

    def delete(
        self,
        *,
        expected_revision: int | None = None,
        allow_missing: bool = False,
        unused_only: bool = False,
    ) -> None:
        """Erase the conversation at once. Its id is not free again for 30 days.

        ``unused_only``: only a session that has never had a turn, whose id is free again then. Raises
        FailedPrecondition (SESSION_USED) where it has had one, TurnInProgress while one runs.
        """
        self._link.run(self._core.delete(expected_revision, allow_missing, unused_only))

    def count_tokens(
        self,
        text: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        items: Sequence[InputLike] | None = None,
    ) -> TokenCount:
        """What this input would cost, without running the model."""
        return self._link.run(self._core.count_tokens(text, tokens, items))
