"""The composition root: a server is put together here from store, tokenizer, engine link, services and two ports.

At start, what can be refused quickly comes first (key file, store, ports) and the engine, which may take minutes, comes
last; ``/healthz`` on the admin port answers from the beginning. Everything that was started is ended in reverse
order, also when a later part does not start.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import importlib.util
import logging
import os
import resource
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
from grpc import aio

from pensieve.debug import debug_enabled
from pensieve.engine.process.host import DEFAULT_BUILDER
from pensieve.errors import PensieveError
from pensieve.logs import configure_logging
from pensieve.model.arch import ModelError
from pensieve.model.folder import load_generation
from pensieve.model.resolve import display_name, resolve_model
from pensieve.options.serve import ServeOptions
from pensieve.server.conversations import Conversations
from pensieve.server.links.process_link import ProcessLink
from pensieve.server.operations.admin_port import AdminPort
from pensieve.server.operations.health import HealthMonitor
from pensieve.server.operations.housekeeping import end_task, purge_forever
from pensieve.server.operations.metrics import Metrics
from pensieve.server.operations.recording import TraceRecorder, header, open_recorder
from pensieve.server.rpc.admin_service import AdminService
from pensieve.server.rpc.auth import Authenticator
from pensieve.server.rpc.grpc_server import (
    BindError,
    add_health_and_reflection,
    bind,
    make_server,
    split_address,
    tls_credentials,
)
from pensieve.server.rpc.interceptor import DEFAULT_IN_FLIGHT, Interceptor
from pensieve.server.rpc.service import ConversationService
from pensieve.server.settings import TurnSettings
from pensieve.server.values import TurnEnd
from pensieve.store import HistoryStore, open_store
from pensieve.store.records import SamplingDefaults
from pensieve.tokenizer import ChatTokenizer
from pensieve.v1 import pensieve_pb2_grpc

log = logging.getLogger(__name__)

DATA_SERVICE: Final = "pensieve.v1.ConversationService"
ADMIN_SERVICE: Final = "pensieve.v1.AdminService"
SWITCH_INTERVAL_S: Final = 0.0005
"""How long the event loop may keep the interpreter from the threads of store and tokenizer. They ask for it after every
statement: with Python's default of 5 ms, a turn's begin waited for much of its time on a front end near its limit; on
one with time to spare there is no difference."""
LAST_CALLS_S: Final = 2.0
"""Time after the drain for answers that are on their way."""


class StartError(Exception):
    """The server cannot start; the text is one line for the operator, ``status`` the exit status."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


class App:
    """One server. ``start``, then ``drain`` and ``close``; ``close`` alone ends it at once."""

    def __init__(self, options: ServeOptions, *, builder: str = DEFAULT_BUILDER) -> None:
        self._options = options
        self._builder = builder
        self._stack = contextlib.AsyncExitStack()
        self._metrics = Metrics()
        self._recorder: TraceRecorder | None = None
        self.grpc_address = ""
        self.admin_address = ""

    async def start(self) -> None:
        """Returns when calls are accepted. Raises StartError, with nothing left running."""
        try:
            await self._start()
        except BaseException as error:
            await self._stack.aclose()
            raise _explained(error) from error

    async def drain(self) -> None:
        """Refuse new turns, let running ones finish within the grace time, then end all calls."""
        await self._monitor.shut_down()
        left = await self._conversations.drain(self._options.drain_grace_s)
        if left:
            log.warning("turns were discarded at the end of the drain", extra={"turns": left})
        await self._data_server.stop(LAST_CALLS_S)

    async def close(self) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        options = self._options
        authenticator = Authenticator(options.api_keys, on_failure=self._metrics.auth_failure)
        folder = await asyncio.to_thread(resolve_model, options.model)
        tokenizer = await asyncio.to_thread(_load_tokenizer, folder, options)
        store = await self._open_store()
        if options.record is not None:
            self._recorder = open_recorder(options.record)
            self._stack.push_async_callback(self._recorder.close)
        self._link = ProcessLink(
            options.engine_options(folder),
            builder=self._builder,
            observer=self._metrics,
            stall_limit_s=options.stall_limit_s,
            log_level=options.log_level,
            log_json=options.log_json,
        )
        self._metrics.watch_engine(self._link)
        settings = self._settings(await asyncio.to_thread(_sampling_defaults, folder), store.store_id)
        self._conversations = Conversations(
            store,
            self._link,
            tokenizer,
            settings,
            on_turn_ended=self._turn_ended,
            on_warmed=self._metrics.warm_ended,
        )
        self._monitor = HealthMonitor(
            self._link,
            store,
            on_store_error=self._metrics.store_error,
            draining=lambda: self._conversations.turns.draining,
        )
        self._link.on_state_change = self._monitor.wake
        # Pushed before the ports are: calls end first, then turns, then the engine, then the store.
        self._stack.push_async_callback(self._link.stop)
        self._stack.push_async_callback(self._conversations.close)
        self._data_server = self._make_data_server(authenticator)
        await self._monitor.start()
        self._stack.push_async_callback(self._monitor.stop)
        self._stack.push_async_callback(end_task, asyncio.create_task(purge_forever(store), name="purge"))
        await self._open_admin_port(authenticator)
        await self._link.start()
        if self._recorder is not None:
            self._recorder.start(header(self._link.info, options))
        await self._monitor.refresh()
        await self._data_server.start()

    def _turn_ended(self, end: TurnEnd) -> None:
        self._metrics.turn_ended(end.outcome)
        if self._recorder is not None:
            self._recorder.turn_ended(end)

    async def _open_store(self) -> HistoryStore:
        try:
            store = open_store(self._options.store, on_error=self._metrics.store_error)
        except ValueError as error:
            raise StartError(f"--store: {error}", status=2) from error
        await store.open()
        self._stack.push_async_callback(store.close)
        return store

    def _settings(self, defaults: SamplingDefaults, store_id: str) -> TurnSettings:
        options = self._options
        return TurnSettings(
            replica=f"{socket.gethostname()}-{secrets.token_hex(4)}",
            model=display_name(options.model),
            defaults=defaults,
            lease_s=options.lease_s,
            heartbeat_s=options.heartbeat_s,
            disconnect_grace_s=options.disconnect_grace_s,
            prefix_sharing=options.prefix_sharing,
            # One listing may be served by several replicas, and by what follows a restart.
            page_secret=hashlib.sha256(f"pages of {store_id}".encode()).digest(),
        )

    def _make_data_server(self, authenticator: Authenticator) -> aio.Server:
        """The data server. Its port is bound at once, so that a taken one is told before a model is loaded."""
        options = self._options
        credentials = None
        if options.tls_cert is not None and options.tls_key is not None:
            credentials = tls_credentials(options.tls_cert, options.tls_key)
        # Whatever the engine would take or queue has to get this far; a full queue is told as such.
        in_flight = max(DEFAULT_IN_FLIGHT, 2 * options.max_queued)
        server = make_server([Interceptor(authenticator, max_in_flight=in_flight)])
        pensieve_pb2_grpc.add_ConversationServiceServicer_to_server(
            ConversationService(self._conversations), server
        )
        add_health_and_reflection(server, self._monitor.servicer, [DATA_SERVICE])
        port = bind(server, options.listen, credentials)
        self._stack.push_async_callback(server.stop, None)
        self.grpc_address = _with_port(options.listen, port)
        return server

    async def _open_admin_port(self, authenticator: Authenticator) -> None:
        folder = Path(tempfile.mkdtemp(prefix="pensieve-"))  # Mode 0700: the socket in it is ours alone.
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        grpc_socket = folder / "admin"
        server = make_server([Interceptor(authenticator)])
        pensieve_pb2_grpc.add_AdminServiceServicer_to_server(
            AdminService(self._link, self._conversations), server
        )
        add_health_and_reflection(server, self._monitor.servicer, [ADMIN_SERVICE, DATA_SERVICE])
        server.add_insecure_port(f"unix:{grpc_socket}")
        self._stack.push_async_callback(server.stop, None)
        await server.start()
        port = AdminPort(self._metrics.registry, lambda: self._monitor.problem, grpc_socket)
        self._stack.push_async_callback(port.close)
        host, number = split_address(self._options.admin)
        try:
            bound = await port.start(host, number)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            raise BindError(f"cannot listen on {self._options.admin}: {why}") from error
        self.admin_address = _with_port(self._options.admin, bound)


def _sampling_defaults(folder: Path) -> SamplingDefaults:
    """The values that the model's authors recommend (generation_config.json): greedy unless they say otherwise."""
    recommended = load_generation(folder)
    return SamplingDefaults(
        temperature=recommended.temperature,
        top_p=recommended.top_p,
        top_k=recommended.top_k,
        min_p=recommended.min_p,
        repetition_penalty=recommended.repetition_penalty,
    )


def _load_tokenizer(folder: Path, options: ServeOptions) -> ChatTokenizer:
    template = options.chat_template
    text = template.read_text(encoding="utf-8") if template is not None else None
    return ChatTokenizer.from_folder(
        folder, chat_template=text, allow_rewriting=options.allow_rewriting_template
    )


def _with_port(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"


def _explained(error: BaseException) -> BaseException:
    """An error that an operator can act on becomes a StartError of one line; any other is a bug and stays as it is."""
    if isinstance(error, PensieveError):
        return StartError(error.message)
    if isinstance(error, ModelError | BindError | OSError):
        return StartError(str(error))
    if isinstance(error, ValueError):
        return StartError(str(error), status=2)
    return error


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop where that package is installed, else asyncio's own: the same, at about a fifth more cost."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return factory


async def _serve(options: ServeOptions, builder: str) -> None:
    loop = asyncio.get_running_loop()
    asked = asyncio.Queue[signal.Signals]()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.put_nowait, number)
    app = App(options, builder=builder)
    stopping = asyncio.create_task(asked.get(), name="signal")
    starting = asyncio.create_task(app.start(), name="start")
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        return
    starting.result()
    # What is here now stays: without this every full collection walks through it and stops all streams meanwhile.
    gc.collect()
    gc.freeze()
    print(f"ready grpc={app.grpc_address} admin={app.admin_address}", flush=True)
    log.info("draining", extra={"signal": (await stopping).name})
    draining = asyncio.create_task(app.drain(), name="drain")
    again = asyncio.create_task(asked.get(), name="second signal")
    await asyncio.wait({draining, again}, return_when=asyncio.FIRST_COMPLETED)
    if draining.done():
        draining.result()
    else:
        log.warning("second signal: running turns are discarded")
        draining.cancel()
    again.cancel()
    await app.close()


def run(options: ServeOptions, *, builder: str = DEFAULT_BUILDER) -> int:
    """Serve until SIGTERM or SIGINT; the exit status: 0 after a drain, 1 or 2 when it cannot start.

    ``builder`` names what makes the engine (``pensieve.engine.process.host``); another one only in tests.
    """
    os.umask(0o077)
    if debug_enabled():
        options = msgspec.structs.replace(options, log_level="debug")
    else:
        # Prompts must not reach the disk by way of a core file, of the engine's neither: it inherits this.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    configure_logging(level=options.log_level, json_lines=options.log_json)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(options, builder))
    except StartError as error:
        print(f"pensieve serve: {error}", file=sys.stderr)
        return error.status
    return 0
