"""The composition root: builds a server from store, tokenizer, engine link, services and ports.

At start, the parts that can fail quickly come first (key file, store, ports) and the engine, which may take minutes,
last. ``/healthz`` on the admin port answers from the beginning. Parts are closed in reverse order, also when a later
part fails to start.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import logging
import os
import resource
import secrets
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Final

import msgspec

from pensieve import __version__
from pensieve.core import SamplingDefaults
from pensieve.debug import debug_enabled
from pensieve.engine.process.host import DEFAULT_BUILDER
from pensieve.errors import InvalidArgument, PensieveError
from pensieve.grpc_thread import end_grpc_thread
from pensieve.logs import AcceptErrorFilter, configure_logging
from pensieve.machine import service_manager
from pensieve.model.arch import ModelError
from pensieve.model.folder import load_generation, model_fingerprint
from pensieve.model.resolve import display_name, resolve_model
from pensieve.options.commands import print_error
from pensieve.options.serve import ServeOptions
from pensieve.server.child import CHILDREN
from pensieve.server.conversations import Conversations, ServiceListeners
from pensieve.server.gateway import GatewayError
from pensieve.server.links.process_link import ProcessLink
from pensieve.server.operations.health import HealthMonitor
from pensieve.server.operations.housekeeping import ManagerNotifier, purge_forever, reap_orphans, watch_lag
from pensieve.server.operations.metrics import Metrics
from pensieve.server.operations.recording import TraceRecorder, header, open_recorder
from pensieve.server.operations.traces import TurnTraces, log_turn, open_traces
from pensieve.server.page.state import RecentTurns, StateView
from pensieve.server.page.web import WebPage
from pensieve.server.ports import Ports
from pensieve.server.rpc.grpc_server import BindError
from pensieve.server.rpc.interceptor import AccessControl
from pensieve.server.settings import TurnSettings
from pensieve.server.tasks import cancel_and_wait, loop_factory
from pensieve.server.values import TurnEnd
from pensieve.store import HistoryStore, open_store
from pensieve.tokenizer import ChatTokenizer

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S: Final = 0.0005
"""Python's thread switch interval. The event loop must yield the interpreter to the threads of store and tokenizer,
which need it after every statement. With Python's default of 5 ms, the begin of a turn was mostly waiting on a front
end near its limit; on one with spare capacity there is no difference."""


class StartError(Exception):
    """The server cannot start. The message is one line for the operator, ``status`` the exit status."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


class App:
    """One server. ``start``, then ``drain`` and ``close``; ``close`` alone ends it at once."""

    def __init__(self, options: ServeOptions, *, builder: str = DEFAULT_BUILDER) -> None:
        self._options = options
        self._builder = builder
        self._stack = contextlib.AsyncExitStack()
        self._metrics = Metrics(by_tenant=options.tenant_metrics)
        self._recent = RecentTurns()
        self._recorder: TraceRecorder | None = None
        self._traces: TurnTraces | None = None
        self._access: AccessControl | None = None
        self._ports: Ports | None = None

    async def start(self) -> None:
        """Return when calls are accepted. Raises StartError and cleans up on failure."""
        try:
            await self._start()
        except BaseException as error:
            await self._stack.aclose()
            raise _explain(error) from error

    async def drain(self) -> None:
        """Refuse new turns, let running ones finish within the grace time, then end all calls."""
        await self._monitor.shut_down()
        assert self._ports is not None, "not started"
        await self._ports.drain()
        discarded = await self._conversations.drain(self._options.drain_grace_s)
        if discarded:
            log.warning("turns were discarded at the end of the drain", extra={"turns": discarded})
        await self._ports.end()

    async def close(self) -> None:
        await self._stack.aclose()

    def say_ready(self) -> None:
        assert self._ports is not None, "not started"
        self._ports.say_ready()

    def reload_keys(self) -> None:
        if self._access is not None:
            self._access.reload_keys(always=True)

    async def _start(self) -> None:
        options = self._options
        self._access = access = AccessControl(options.api_keys, self._metrics)
        folder = await _resolve(options.model)
        tokenizer = await asyncio.to_thread(_load_tokenizer, folder, options)
        for warning in tokenizer.warnings:
            log.warning(warning)
        store = await self._open_store()
        if options.record is not None:
            self._recorder = open_recorder(options.record, self._metrics.recorded)
            self._stack.push_async_callback(self._recorder.close)
        self._link = ProcessLink(
            options.engine_options(folder, eos_token_ids=tokenizer.eos_token_ids),
            builder=self._builder,
            observer=self._metrics,
            stall_limit_s=options.stall_limit_s,
            log_level=options.log_level,
            log_json=options.log_json,
        )
        self._metrics.watch_engine(self._link)
        self._metrics.processes.watch_engine(lambda: self._link.pid)
        weights, form = options.load_format != "dummy", options.weights
        model_sha256 = await asyncio.to_thread(model_fingerprint, folder, weights=weights, form=form)
        defaults = await asyncio.to_thread(_sampling_defaults, folder)
        settings = self._settings(defaults, store.store_id, model_sha256)
        if options.traces is not None:
            await self._open_traces(options.traces, settings)
        listeners = ServiceListeners(
            turn_ended=self._turn_ended,
            turn_refused=self._metrics.turn_refused,
            warmed=self._metrics.warm_ended,
            compacted=self._metrics.compacted,
            store_regression=self._metrics.store_regression,
        )
        self._conversations = Conversations(
            store, self._link, tokenizer, settings, listeners, tenants=access.tenants
        )
        self._monitor = HealthMonitor(
            self._link,
            store,
            on_store_error=self._metrics.store_error,
            draining=lambda: self._conversations.turns.draining,
        )
        self._link.on_state_change = self._monitor.wake
        self._metrics.watch_queue(self._conversations.gate)
        if self._metrics.watch_usage(self._conversations.usage):
            self._stack.push_async_callback(
                cancel_and_wait, asyncio.create_task(self._conversations.usage.watch(), name="usage")
            )
        # Pushed before the ports: calls end first, then turns, then the engine, then the store.
        self._stack.push_async_callback(self._link.stop)
        self._stack.push_async_callback(self._conversations.close)
        self._ports = ports = Ports(options, access, self._stack)
        ports.bind(self._link, self._conversations, self._monitor)
        await self._monitor.start()
        self._stack.push_async_callback(self._monitor.stop)
        for name, work in (
            ("purge", purge_forever(store)),
            ("lag", watch_lag(self._metrics.processes.observe_lag)),
            ("orphans", reap_orphans(CHILDREN)),
        ):
            self._stack.push_async_callback(cancel_and_wait, asyncio.create_task(work, name=name))
        shows_text = options.page_text
        state = StateView(
            self._conversations, self._monitor, self._recent, ports.http_door_state, shows_text=shows_text
        )
        page = WebPage(state, access.admit_operator)
        self._stack.push_async_callback(page.close)
        await ports.open_admin(self._monitor, self._metrics, page)
        self._stack.push_async_callback(cancel_and_wait, asyncio.create_task(access.watch(), name="keys"))
        await self._link.start()
        info = self._link.info
        self._metrics.processes.describe(model=settings.model, device=info.device, dtype=info.dtype)
        if self._recorder is not None:
            self._recorder.start(header(self._link.info, options))
        await self._monitor.refresh()
        await ports.start()

    async def _open_traces(self, url: str, settings: TurnSettings) -> None:
        names = {"model": settings.model, "version": __version__, "instance": settings.replica}
        self._traces = await asyncio.to_thread(open_traces, url, **names)
        self._stack.push_async_callback(self._traces.close)

    def _turn_ended(self, end: TurnEnd) -> None:
        self._recent.turn_ended(end)
        self._metrics.turn_ended(end)
        log_turn(end)
        if self._traces is not None:
            self._traces.turn_ended(end)
        if self._recorder is not None:
            self._recorder.turn_ended(end)

    async def _open_store(self) -> HistoryStore:
        try:
            store = open_store(
                self._options.store,
                on_error=self._metrics.store_error,
                on_regression=lambda: self._metrics.store_regression("server"),
            )
        except ValueError as error:
            raise StartError(f"--store: {error}", status=2) from error
        await store.open()
        self._stack.push_async_callback(store.close)
        return store

    def _settings(self, defaults: SamplingDefaults, store_id: str, model_sha256: str) -> TurnSettings:
        options = self._options
        return TurnSettings(
            replica=f"{socket.gethostname()}-{secrets.token_hex(4)}",
            model=options.served_model_name or display_name(options.model),
            model_sha256=model_sha256,
            defaults=defaults,
            lease_s=options.lease_s,
            heartbeat_s=options.heartbeat_s,
            max_wait_s=options.max_wait_s,
            max_queued=options.max_queued,
            max_queued_tokens=options.max_queued_tokens,
            disconnect_grace_s=options.disconnect_grace_s,
            prefix_sharing=options.prefix_sharing,
            # Several replicas may serve one listing, and so may a restarted server.
            page_secret=hashlib.sha256(f"pages of {store_id}".encode()).digest(),
        )


async def _resolve(model: str) -> Path:
    """Return the folder or file of the model. If cancelled during a download, do not wait for it."""
    leaving = threading.Event()
    try:
        return await asyncio.to_thread(resolve_model, model, leaving)
    except asyncio.CancelledError:
        leaving.set()
        raise


def _sampling_defaults(folder: Path) -> SamplingDefaults:
    """Return the values recommended in generation_config.json; greedy without them."""
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


def _explain(error: BaseException) -> BaseException:
    """Convert an error that the operator can act on to a one-line StartError. Any other is a bug and stays as it is."""
    if isinstance(error, PensieveError):
        return StartError(error.message, status=2 if isinstance(error, InvalidArgument) else 1)
    if isinstance(error, OSError):
        return StartError(str(error))
    if isinstance(error, ModelError | ValueError | GatewayError | BindError):
        return StartError(str(error), status=2)
    return error


async def _serve(options: ServeOptions, builder: str) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(AcceptErrorFilter())
    signals = asyncio.Queue[signal.Signals]()
    app = App(options, builder=builder)
    manager = ManagerNotifier(service_manager())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    loop.add_signal_handler(signal.SIGHUP, app.reload_keys)
    try:
        await _serve_until_signal(app, signals, manager)
    finally:
        manager.close()
        # uvloop leaves them in place, and through them its loop, the server and gRPC's thread.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)


async def _serve_until_signal(
    app: App, signals: asyncio.Queue[signal.Signals], manager: ManagerNotifier
) -> None:
    stopping = asyncio.create_task(signals.get(), name="signal")
    starting = asyncio.create_task(app.start(), name="start")
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        await cancel_and_wait(starting)
        return
    starting.result()
    # Everything here now stays: without this, each full collection walks through it and stalls all streams.
    gc.collect()
    gc.freeze()
    app.say_ready()
    manager.notify_ready()
    turning = asyncio.create_task(manager.feed_watchdog(), name="watchdog")
    log.info("draining", extra={"signal": (await stopping).name})
    manager.notify_stopping()
    draining = asyncio.create_task(app.drain(), name="drain")
    again = asyncio.create_task(signals.get(), name="second signal")
    await asyncio.wait({draining, again}, return_when=asyncio.FIRST_COMPLETED)
    if draining.done():
        draining.result()
    else:
        log.warning("second signal: running turns are discarded")
        draining.cancel()
    again.cancel()
    await app.close()
    await cancel_and_wait(turning)


def run(options: ServeOptions, *, builder: str = DEFAULT_BUILDER) -> int:
    """Serve until SIGTERM or SIGINT. Return the exit status: 0 after a drain, 1 or 2 when the server cannot start.
    ``builder`` names the function that builds the engine (``pensieve.engine.process.host``); tests use others."""
    gc.freeze()  # what imports have made stays: no collection need walk through it
    gc.enable()  # the command imports this module without it
    os.umask(0o077)
    if debug_enabled():
        options = msgspec.structs.replace(options, log_level="debug")
    else:
        # Prompts must not reach the disk through core files, including those of the engine, which inherits this.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    configure_logging(level=options.log_level, json_lines=options.log_json)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    status = 0
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_serve(options, builder))
    except StartError as error:
        print_error(str(error), "pensieve serve")
        status = error.status
    end_grpc_thread()
    return status
