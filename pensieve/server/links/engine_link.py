"""The front end's view of an engine, whether in this process or in another.

Each event of a generation goes at once, on the event loop, to the sink that was submitted with it. A link
never blocks the event loop and queues no events; a slow reader's output is merged in the turn's buffer.
"""

from __future__ import annotations

import enum
from typing import Protocol

from pensieve.core import DEFAULT_QOS, ContextLimit, RequestKey, SessionKey, TenantQos, TokenArray
from pensieve.engine.messages import (
    CandidateFinished,
    EngineReady,
    Finished,
    Memory,
    Output,
    RequestProgress,
    ResidentTokens,
    SessionStrip,
    Started,
    Stats,
    Submit,
    Warmed,
)


class LinkState(enum.StrEnum):
    """State of a link. Only ``BaseLink`` changes it::

    STARTING    engine up      SERVING
    SERVING     engine lost    RESTARTING
    RESTARTING  engine up      SERVING
    any         stop           STOPPED
    """

    STARTING = "starting"
    SERVING = "serving"
    RESTARTING = "restarting"
    STOPPED = "stopped"


class GenerationSink(Protocol):
    """Receives the events of one generation, in order, on the event loop, after ``submit`` has returned.

    The last call is ``finished`` or ``failed``, or the one before ``Generation.cancel``, which a sink may
    call at any time. If a call raises, only this generation ends, with ``failed``, which must not raise.
    """

    def started(self, event: Started) -> None: ...

    def progress(self, event: RequestProgress) -> None: ...

    def tokens(self, event: Output) -> None: ...

    def candidate_finished(self, event: CandidateFinished) -> None:
        """Called only with several candidates; possibly also for one that was just cancelled."""
        ...

    def finished(self, event: Finished) -> None: ...

    def failed(self, error: Exception) -> None:
        """The generation ended without a result. Errors: Unavailable (ENGINE_RESTARTING, DRAINING), Internal
        (ENGINE_FAILED: the engine could not serve this request; REQUEST_QUARANTINED, SESSION_QUARANTINED: see
        ``submit``), ContextLimitExceeded (it can never fit), InvalidArgument (GRAMMAR_TOO_COSTLY),
        ResourceExhausted (the engine's queue is full), or what this sink raised."""
        ...


class Generation(Protocol):
    """Handle to stop a running generation."""

    @property
    def request(self) -> RequestKey: ...

    def cancel(self) -> None:
        """Stop within one step, without further calls to the sink. Never raises; no effect after the end."""
        ...

    def cancel_candidate(self, candidate: int) -> None:
        """Stop one of several candidates; ``finished`` follows when the others have ended. Never raises."""
        ...


class EngineLink(Protocol):
    @property
    def info(self) -> EngineReady:
        """The engine's properties. Raises Unavailable (STARTING) before it is up."""
        ...

    @property
    def state(self) -> LinkState: ...

    @property
    def stats(self) -> Stats: ...

    @property
    def restarts_total(self) -> int:
        """Engines that replaced one that had died."""
        ...

    @property
    def stalled(self) -> bool:
        """No step has ended for longer than a step of its size can take, while work is waiting (see ``Watchdog``)."""
        ...

    async def start(self) -> None:
        """Start the engine; returns when it is ready. Raises Internal with the engine's own message."""
        ...

    def submit(self, command: Submit, sink: GenerationSink) -> Generation:
        """Start a generation; sets its number in ``command``. ``sink`` is never called if this raises.

        Raises Unavailable (STARTING, ENGINE_RESTARTING, DRAINING) when no engine accepts work; Internal
        (REQUEST_QUARANTINED) for a turn (``command.origin``) that has ended the engine twice, or its context;
        Internal (SESSION_QUARANTINED) for all turns of a session with two such turns.
        """
        ...

    def choose(self, session: SessionKey, candidate: int) -> None:
        """Make another candidate than 0 the answer of the session's latest turn. Never raises: an engine that
        misses it recomputes the KV."""
        ...

    async def evict(self, session: SessionKey | None = None) -> int:
        """Drop cached KV of one session, or of all idle ones; returns the number of tokens dropped."""
        ...

    async def residency(self, session: SessionKey) -> ResidentTokens: ...

    async def memory(self, wanted: int | None = None) -> Memory:
        """Set the wanted bytes of the device tier, for this engine and those that replace it; None: only ask. Answered
        at once, also by ``refused``."""
        ...

    async def read_strips(self) -> list[SessionStrip]:
        """Where the chunks of all cached sessions are. Read in several calls, between which the engine goes on."""
        ...

    async def warm(
        self, session: SessionKey, tokens: TokenArray, *, scope: str = "", qos: TenantQos = DEFAULT_QOS
    ) -> Warmed:
        """Ask for the KV of ``tokens``, a session's whole history, on the device. Answered before it is there."""
        ...

    async def stop(self) -> None:
        """Running generations fail with Unavailable (DRAINING)."""
        ...


def context_limit(info: EngineReady) -> ContextLimit:
    """Exclusive limit of a context, in tokens: the model's, or the capacity of the device tier if that is smaller."""
    limit = ContextLimit(min(info.context_limit, info.device_capacity_tokens or info.context_limit))
    if limit < info.model_context_limit:
        limit.note = (
            f"the device tier of the cache sets this limit, not the model, which takes {info.model_context_limit}: a "
            "larger --device-cache raises it"
        )
    return limit
