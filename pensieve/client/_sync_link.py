"""The blocking shell: performs what the flows and the turn machine ask for, on a ``grpc`` channel."""

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
"""Makes the call of a step and returns it at once, as a future of gRPC."""


class ReadWatch:
    """One blocking read under observation. ``expired`` is set before its call is cancelled."""

    def __init__(self) -> None:
        self.deadline: float | None = None
        """Monotonic time; None while the caller does not read: a slow consumer is no silent server."""
        self.call: Any = None
        self.expired = False


class BackgroundFlow:
    """The next step of a flow that runs in the background."""

    def __init__(self, flow: Flow[None], begin: StartCall) -> None:
        self.flow = flow
        self.start_call = begin
        self.call: Any = None
        """Kept: gRPC would not end a call that is dropped."""
        self.resume_at: float | None = None
        """Monotonic time at which it goes on; None while a call is under way."""


class Janitor:
    """The one helper thread of a blocking client: ends silent streams and cleans up after streams that were dropped.

    It exists for two reasons. A blocking read has no timeout of its own. And a call object that is dropped without
    ``cancel`` is never collected and never cancelled by grpc, while a finaliser may run anywhere, even inside grpc
    under a lock; so finalisers only put a job into a ``SimpleQueue``, whose ``put`` is made for that.

    The first stream starts it; ``close`` runs what is queued and waits for the thread.
    """

    TICK_S = 1.0

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._watches: set[ReadWatch] = set()
        self._errands: set[BackgroundFlow] = set()
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
        """Run ``job`` soon."""
        self._jobs.put(job)

    def run_flow(self, flow: Flow[None], begin: StartCall) -> None:
        """Go through ``flow``, from now on, as far as it gets before ``close``."""
        errand = BackgroundFlow(flow, begin)
        self._jobs.put(lambda: self._go_on(errand))

    def close(self, timeout: float) -> None:
        self._jobs.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        until: float | None = None
        """Once it is closed: when it ends at the latest."""
        while until is None or (self._errands and time.monotonic() < until):
            try:
                job = self._jobs.get(timeout=self._pause(until))
            except queue.Empty:
                self._check()
                continue
            if job is None:
                until = time.monotonic() + 1.0
            else:
                job()
            del job  # It may hold a call.
        for errand in self._errands:
            if errand.call is not None:
                errand.call.cancel()

    def _pause(self, until: float | None) -> float | None:
        """How long to wait for a job before ``_check``; None, with nothing under observation: until a job comes."""
        times = (
            [watch.deadline for watch in list(self._watches)]
            + [one.resume_at for one in self._errands]
            + [until]
        )
        nearest = min((one for one in times if one is not None), default=None)
        if nearest is None:
            return self.TICK_S if self._watches else None
        return min(self.TICK_S, max(0.005, nearest - time.monotonic()))

    def _check(self) -> None:
        now = time.monotonic()
        for watch in list(self._watches):
            deadline, call = watch.deadline, watch.call
            if deadline is not None and deadline <= now and call is not None and not watch.expired:
                watch.expired = True
                call.cancel()
        for errand in list(self._errands):
            if errand.resume_at is not None and errand.resume_at <= now:
                self._go_on(errand)

    def _go_on(self, errand: BackgroundFlow, error: PensieveError | None = None) -> None:
        """Take the next step of a flow, all of them in this thread."""
        errand.call = errand.resume_at = None
        self._errands.add(errand)
        try:
            step = errand.flow.send(None) if error is None else errand.flow.throw(error)
        except (StopIteration, PensieveError):
            self._errands.discard(errand)
            return
        if isinstance(step, Sleep):
            errand.resume_at = time.monotonic() + step.seconds
            return
        errand.call = errand.start_call(step)
        errand.call.add_done_callback(lambda call: self._jobs.put(lambda: self._ended(errand, call)))

    def _ended(self, errand: BackgroundFlow, call: Any) -> None:
        self._go_on(errand, None if call.code() is grpc.StatusCode.OK else from_rpc_error(call))


T = TypeVar("T")

CLOSE_TIMEOUT_S = 2.0
_FORKED = (
    "the stream belongs to the process that this one was forked from: attach to its turn to follow it here"
)


class Link:
    """Channel, stub and helper thread: what a client and its handles share, closed when the last of them goes.

    Threads and calls do not come along into a process that was forked off: there everything is made anew, when it is
    first used. What the parent has open is left alone, since ending it would wait for threads that do not exist.
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
        """Called in a new process, while it has one thread."""
        self._opening = threading.Lock()
        if self._opened is not None:
            self._opened.close.detach()
            _parent_channels.append(self._opened)
            self._opened = None
        was_closed, self.closed = self.closed.is_set(), threading.Event()
        if was_closed:
            self.closed.set()

    def run(self, flow: Flow[T]) -> T:
        """Drive a flow to its end."""
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
        return getattr(self.stub, step.method)(step.request, timeout=step.timeout, metadata=metadata)

    def check_open(self) -> None:
        """Raises Cancelled when the client is closed; SystemExit in a daemon thread that the program's end stops."""
        if self.closed.is_set():
            if threading.current_thread().daemon and not threading.main_thread().is_alive():
                # ``_close`` has run because the program ends, or might have: nobody is left to tell, and an error would
                # be a traceback behind the program's last words. This ends a thread in silence, as _thread.exit does.
                raise SystemExit
            raise Cancelled("the client is closed", reason="CLIENT_CLOSED")

    def discard(self, session: str, request_id: str, stream_id: str) -> None:
        """Tell the server, in the background, that nobody will come back; else the session stays busy."""
        # Not `self` in what waits: it must not keep alive what its caller has dropped.
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
    """What a link has open in this process."""

    channel: Any
    stub: Any
    janitor: Janitor
    close: weakref.finalize[..., Link]
    """Ends it; to be called once the link is dropped, and at the end of the program."""


_links: weakref.WeakSet[Link] = weakref.WeakSet()
_parent_channels: list[OpenChannel] = []
_parent_calls: list[Any] = []
"""Both are kept for good: to collect a channel or a call would be to end it."""


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
    """The pieces of one turn. Iterate it, and leave the loop whenever you like; or call ``finish``.

    ``cancel`` and ``close`` may come from another thread than the reading one.
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
        """Wait until the server has accepted the turn. Raises what it refuses the turn with."""
        self._advance_until(lambda: self._machine.base_revision is not None)

    def finish(self) -> Turn:
        """Read to the end; the turn."""
        for _ in self:
            pass
        return self.turn

    def cancel(self, *, keep: Keep = "partial", keep_output_tokens: int | None = None) -> Turn:
        """Stop the turn and end the stream; what stands in history afterwards is the answer, and ``turn``."""
        turn = self._link.run(
            self._core.cancel(self.request_id, keep, keep_output_tokens, self._machine.stream_id)
        )
        self._machine.on_cancelled(turn)
        self.close()
        return turn

    def close(self) -> None:
        """Walk away: a turn that is not complete is discarded (see ``Session.stream``). Idempotent."""
        if self._of_parent():
            return
        discard = self._mark_closed()
        self._wake.set()
        self._drop()
        if discard:
            self._discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # May run inside grpc, under its locks: only hand the work over.
        if self._of_parent():
            return
        call, link = self._call, self._link
        if self._mark_closed():
            self._discard()
        if call is not None:
            link.janitor.submit(_cancel_job(call))
            link.janitor.unwatch(self._watch)

    def _of_parent(self) -> bool:
        """Whether the turn belongs to the process that this one was forked from, which goes on with it."""
        if self._process == os.getpid():
            return False
        if self._call is not None:
            _parent_calls.append(self._call)
            self._call = None
        return True

    def _advance_until(self, reached: Callable[[], object]) -> None:
        try:
            while not reached() and not self._machine.done and not self._closed:
                if self._of_parent():
                    raise Cancelled(_FORKED, reason="CLIENT_CLOSED")
                self._advance()
        except PensieveError:
            self._discard_on_close = False  # The server has said no, or cannot be asked.
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
        """Take one message, or get over one failure."""
        try:
            self._machine.on_message(self._read())
            return
        except grpc.RpcError as error:
            failure = self._machine.silence_error() if self._watch.expired else from_rpc_error(error)
        except PensieveError as error:
            failure = error
        self._drop()
        if self._machine.done or self._closed:
            return  # Ended from another thread.
        self._link.check_open()
        self._wake.wait(self._machine.on_error(failure))

    def _read(self) -> pb.StreamTurnResponse:
        call = self._call or self._open()  # which another thread may drop from here on
        watch = self._watch
        watch.deadline = time.monotonic() + self._machine.silence_s
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
            # Closed meanwhile, by another thread or a signal: whoever did that knew nothing of this call.
            self._drop()
            if self._discard_on_close:
                self._discard()
        return call

    def _discard(self) -> None:
        self._link.discard(self._core.name, self.request_id, self._machine.stream_id)

    def _drop(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
            self._watch.call = None
            self._link.janitor.unwatch(self._watch)


def _cancel_job(call: Any) -> Callable[[], None]:
    def job() -> None:
        call.cancel()

    return job
