"""The blocking shell: performs the steps of flows and of the turn machine on a ``grpc`` channel."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import grpc
from google.protobuf.message import Message

from pensieve.client._exports import LineJoiner
from pensieve.client._flows import SessionCore
from pensieve.client._steps import Flow, Invoke, Sleep, discard
from pensieve.client._transport import ClientSettings, open_channel
from pensieve.client._turn_machine import TurnMachine
from pensieve.client._values import Piece, Turn
from pensieve.client._view import StreamView
from pensieve.client.arguments import Keep
from pensieve.errors import Cancelled, PensieveError
from pensieve.rpc_status import from_rpc_error
from pensieve.v1 import pensieve_pb2 as pb

Job = Callable[[], None]
StartCall = Callable[[Invoke], Any]
"""Start the call of a step and return it at once, as a gRPC future."""


class ReadWatch:
    """A blocking read that may time out. ``expired`` is set before its call is cancelled."""

    def __init__(self) -> None:
        self.deadline: float | None = None
        """Monotonic time; None while the caller does not read, since a slow consumer is not a silent server."""
        self.call: Any = None
        self.expired = False


class BackgroundFlow:
    def __init__(self, flow: Flow[None], begin: StartCall) -> None:
        self.flow = flow
        self.start_call = begin
        self.call: Any = None
        """The call in flight. Kept here because gRPC would not end a call that is dropped."""
        self.resume_at: float | None = None
        """Monotonic time at which to resume it; None while a call is in flight."""


class Janitor:
    """The helper thread of a blocking client: ends silent streams and cleans up after dropped ones.

    Two reasons. A blocking read has no timeout of its own. And gRPC neither collects nor cancels a call object
    that is dropped without ``cancel``, while a finaliser may run anywhere, even inside gRPC under a lock. So
    finalisers only put a job into a ``SimpleQueue``, whose ``put`` is reentrant.

    The first stream starts the thread. ``close`` runs the queued jobs and waits for it.
    """

    TICK_S = 1.0

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._watches: set[ReadWatch] = set()
        self._flows: set[BackgroundFlow] = set()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pensieve-client", daemon=True)
                self._thread.start()

    def watch(self, watch: ReadWatch) -> None:
        self._jobs.put(lambda: self._watches.add(watch))

    def unwatch(self, watch: ReadWatch) -> None:
        self._jobs.put(lambda: self._watches.discard(watch))

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def run_flow(self, flow: Flow[None], begin: StartCall) -> None:
        """Run ``flow`` in the background, as far as it gets before ``close``."""
        background = BackgroundFlow(flow, begin)
        self._jobs.put(lambda: self._advance_flow(background))

    def close(self, timeout: float) -> None:
        self._jobs.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        end_at: float | None = None
        """Monotonic time at which the thread ends at the latest, once closed."""
        while end_at is None or (self._flows and time.monotonic() < end_at):
            try:
                job = self._jobs.get(timeout=self._wait_s(end_at))
            except queue.Empty:
                self._check_deadlines()
                continue
            if job is None:
                end_at = time.monotonic() + 1.0
            else:
                job()
            del job  # It may hold a call.
        for background in self._flows:
            if background.call is not None:
                background.call.cancel()

    def _wait_s(self, end_at: float | None) -> float | None:
        """Return the seconds to wait for a job before ``_check_deadlines``; None: nothing is being watched."""
        times = (
            [watch.deadline for watch in list(self._watches)]
            + [flow.resume_at for flow in self._flows]
            + [end_at]
        )
        nearest = min((at for at in times if at is not None), default=None)
        if nearest is None:
            return self.TICK_S if self._watches else None
        return min(self.TICK_S, max(0.005, nearest - time.monotonic()))

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for watch in list(self._watches):
            deadline, call = watch.deadline, watch.call
            if deadline is not None and deadline <= now and call is not None and not watch.expired:
                watch.expired = True
                call.cancel()
        for background in list(self._flows):
            if background.resume_at is not None and background.resume_at <= now:
                self._advance_flow(background)

    def _advance_flow(self, background: BackgroundFlow, error: PensieveError | None = None) -> None:
        """Run the next step of a flow. Only this thread runs steps."""
        background.call = background.resume_at = None
        self._flows.add(background)
        try:
            step = background.flow.send(None) if error is None else background.flow.throw(error)
        except (StopIteration, PensieveError):
            self._flows.discard(background)
            return
        if isinstance(step, Sleep):
            background.resume_at = time.monotonic() + step.seconds
            return
        background.call = background.start_call(step)
        background.call.add_done_callback(
            lambda call: self._jobs.put(lambda: self._on_call_done(background, call))
        )

    def _on_call_done(self, background: BackgroundFlow, call: Any) -> None:
        self._advance_flow(background, None if call.code() is grpc.StatusCode.OK else from_rpc_error(call))


T = TypeVar("T")

CLOSE_TIMEOUT_S = 2.0
_FORKED = "this stream belongs to the parent process: use session.attach(request_id) to follow its turn after a fork"


class Link:
    """The channel, stub and helper thread of a client and its handles. Closed when all are dropped.

    A forked process has neither the threads nor the calls, so it opens everything anew on first use. It leaves
    the parent's channel alone: closing it would wait for threads that do not exist.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self.closed = threading.Event()
        self._opening = threading.Lock()
        self._opened: OpenChannel | None = self._open()
        _links.add(self)

    def _open(self) -> OpenChannel:
        channel, stub = open_channel(self.settings, grpc)
        janitor = Janitor()
        return OpenChannel(
            channel, stub, janitor, weakref.finalize(self, _close, channel, janitor, self.closed)
        )

    @property
    def opened(self) -> OpenChannel:
        if (opened := self._opened) is not None:
            return opened
        with self._opening:
            if self._opened is None:
                self._opened = self._open()
            return self._opened

    @property
    def stub(self) -> Any:
        return self.opened.stub

    @property
    def janitor(self) -> Janitor:
        return self.opened.janitor

    def on_fork(self) -> None:
        """Reset in a forked process, while it has one thread."""
        self._opening = threading.Lock()
        if self._opened is not None:
            self._opened.close.detach()
            _parent_channels.append(self._opened)
            self._opened = None
        was_closed, self.closed = self.closed.is_set(), threading.Event()
        if was_closed:
            self.closed.set()

    def run(self, flow: Flow[T]) -> T:
        try:
            step = next(flow)
            while True:
                if isinstance(step, Sleep):
                    self.closed.wait(step.seconds)
                    step = flow.send(None)
                    continue
                try:
                    response = self._invoke(step)
                except grpc.RpcError as error:
                    step = flow.throw(from_rpc_error(error))
                else:
                    step = flow.send(response)
        except StopIteration as stop:
            value: T = stop.value
            return value

    def _invoke(self, step: Invoke) -> Any:
        self.check_open()
        metadata = self.settings.metadata(step.session)
        request = iter(step.request) if isinstance(step.request, tuple) else step.request
        return getattr(self.stub, step.method)(request, timeout=step.timeout, metadata=metadata)

    def stream(self, method: str, request: Message, session: str = "") -> Iterator[Any]:
        """Make one call and yield its responses. Neither retried nor limited in time. Leaving early cancels it."""
        self.check_open()
        call, janitor = (
            getattr(self.stub, method)(request, metadata=self.settings.metadata(session)),
            self.janitor,
        )
        janitor.start()
        try:
            yield from call
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            janitor.submit(call.cancel)  # may run in a finaliser, inside grpc

    def lines(self, method: str, request: Message, session: str = "") -> Iterator[bytes]:
        """As ``stream``, for an export: yield its lines, each with its line feed."""
        joiner = LineJoiner()
        for message in self.stream(method, request, session):
            yield from joiner.feed(message.data)

    def check_open(self) -> None:
        """Raise Cancelled if the client is closed; SystemExit in a daemon thread while the program exits."""
        if self.closed.is_set():
            if threading.current_thread().daemon and not threading.main_thread().is_alive():
                # ``_close`` has probably run because the program exits. An error would print a traceback after the
                # program's last output. SystemExit ends the thread silently, as _thread.exit does.
                raise SystemExit
            raise Cancelled("the client is closed", reason="CLIENT_CLOSED")

    def discard(self, session: str, request_id: str, stream_id: str) -> None:
        """Tell the server in the background that the client has left the turn. Otherwise the session stays busy."""
        # The waiting flow must not hold `self`, which would keep a link alive that its caller has dropped.
        if self.closed.is_set():
            return
        stub, metadata = self.stub, self.settings.metadata(session)

        def begin(step: Invoke) -> Any:
            return getattr(stub, step.method).future(step.request, timeout=step.timeout, metadata=metadata)

        self.janitor.run_flow(discard(self.settings, session, request_id, stream_id), begin)

    def close(self) -> None:
        self.closed.set()
        with self._opening:
            opened = self._opened
        if opened is not None:
            opened.close()


class OpenChannel(NamedTuple):
    """The open resources of a link in this process."""

    channel: Any
    stub: Any
    janitor: Janitor
    close: weakref.finalize[..., Link]
    """Closes them; runs when the link is dropped and when the program exits."""


_links: weakref.WeakSet[Link] = weakref.WeakSet()
_parent_channels: list[OpenChannel] = []
_parent_calls: list[Any] = []
"""Both are kept for good: collecting a channel or a call would end it."""


def _after_fork() -> None:
    for link in list(_links):
        link.on_fork()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_after_fork)


def _close(channel: Any, janitor: Janitor, closed: threading.Event) -> None:
    closed.set()
    janitor.close(CLOSE_TIMEOUT_S)
    channel.close()


class TurnStream(StreamView):
    """The pieces of one turn. Iterate over it, leaving the loop at any time, or call ``finish``.

    ``cancel`` and ``close`` may be called from another thread than the reading one.
    """

    def __init__(self, link: Link, core: SessionCore, machine: TurnMachine) -> None:
        super().__init__(core, machine)
        self._link = link
        self._call: Any = None
        self._watch = ReadWatch()
        self._wake = threading.Event()
        self._process = os.getpid()

    def __iter__(self) -> Iterator[Piece]:
        try:
            while (piece := self._next()) is not None:
                yield piece
        finally:
            self.close()

    def __next__(self) -> Piece:
        piece = self._next()
        if piece is None:
            raise StopIteration
        return piece

    def accepted(self) -> None:
        """Wait until the server has accepted the turn. Raises the error if it refuses."""
        self._advance_until(lambda: self._machine.base_revision is not None)

    def finish(self) -> Turn:
        """Read to the end and return the turn."""
        for _ in self:
            pass
        return self.turn

    def cancel(self, *, keep: Keep = "partial", keep_output_tokens: int | None = None) -> Turn:
        """Stop the turn and close the stream. Return the turn as history has it now, also available as ``turn``."""
        turn = self._link.run(
            self._core.cancel(self.request_id, keep, keep_output_tokens, self._machine.stream_id)
        )
        self._machine.on_cancelled(turn)
        self.close()
        return turn

    def close(self) -> None:
        """Leave the stream. A turn that is not complete is discarded (see ``Session.stream``). Idempotent."""
        if self._belongs_to_parent():
            return
        discard = self._mark_closed()
        self._wake.set()
        self._drop_call()
        if discard:
            self._discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # May run inside grpc, under its locks: only queue the work.
        if self._belongs_to_parent():
            return
        call, link = self._call, self._link
        if self._mark_closed():
            self._discard()
        if call is not None:
            link.janitor.submit(call.cancel)
            link.janitor.unwatch(self._watch)

    def _belongs_to_parent(self) -> bool:
        """Whether the turn belongs to the parent of this forked process, which continues it."""
        if self._process == os.getpid():
            return False
        if self._call is not None:
            _parent_calls.append(self._call)
            self._call = None
        return True

    def _advance_until(self, reached: Callable[[], object]) -> None:
        try:
            while not reached() and not self._machine.done and not self._closed:
                if self._belongs_to_parent():
                    raise Cancelled(_FORKED, reason="CLIENT_CLOSED")
                self._advance()
        except PensieveError:
            self._discard_on_close = False  # The server has refused the turn or is unreachable.
            self.close()
            raise

    def _next(self) -> Piece | None:
        pending = self._machine.pending
        self._advance_until(lambda: pending)
        if pending:
            return pending.popleft()
        self.close()
        return None

    def _advance(self) -> None:
        try:
            self._machine.on_message(self._read())
            return
        except grpc.RpcError as error:
            failure = self._machine.silence_error() if self._watch.expired else from_rpc_error(error)
        except PensieveError as error:
            failure = error
        self._drop_call()
        if self._machine.done or self._closed:
            return  # Ended from another thread.
        self._link.check_open()
        self._wake.wait(self._machine.on_error(failure))

    def _read(self) -> pb.StreamTurnResponse:
        call = self._call or self._open()  # another thread may drop it from here on
        watch = self._watch
        watch.deadline = time.monotonic() + self._machine.silence_limit_s
        try:
            message: pb.StreamTurnResponse = next(call)
        except StopIteration:
            raise self._machine.early_end_error() from None
        finally:
            watch.deadline = None
        return message

    def _open(self) -> Any:
        self._link.check_open()
        remaining = self._machine.remaining_s()
        self._start()
        self._watch = ReadWatch()
        call = self._call = self._watch.call = self._link.stub.StreamTurn(
            self._machine.next_request(),
            timeout=remaining,
            metadata=self._link.settings.metadata(self._core.name, self._span.header),
        )
        self._link.janitor.start()
        self._link.janitor.watch(self._watch)
        if self._closed:
            # Closed meanwhile by another thread or a signal handler, which did not know of this call.
            self._drop_call()
            if self._discard_on_close:
                self._discard()
        return call

    def _discard(self) -> None:
        self._link.discard(self._core.name, self.request_id, self._machine.stream_id)

    def _drop_call(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
            self._watch.call = None
            self._link.janitor.unwatch(self._watch)
