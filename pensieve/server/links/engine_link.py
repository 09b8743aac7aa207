"""The front end's view of an engine, the same for an engine in this process and one in another.

``EngineLink`` hands commands over and deals reports out: every event of a generation goes at once, on the event loop,
to the sink that was submitted with it. A link never blocks the event loop and keeps no events: what a slow reader has
not read yet is merged behind the sink, in the turn's buffer.
"""

from __future__ import annotations

import enum
from typing import Protocol

from pensieve.core import DEFAULT_QOS, ContextLimit, RequestKey, SessionKey, TenantQos, TokenArray
from pensieve.engine.messages import (
    CandidateFinished,
    EngineReady,
    Finished,
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
    """Takes what one generation brings, in the order in which the engine reported it.

    The link calls these methods on the event loop, from the moment ``submit`` has returned until one call of
    ``finished`` or ``failed``, which is the last; after ``Generation.cancel`` it calls none any more. A sink may cancel
    its generation from within a call. One that raises loses its generation, which ends with ``failed``: the other
    generations in the same report get their events all the same. ``failed`` itself must not raise.
    """

    def started(self, event: Started) -> None: ...

    def progress(self, event: RequestProgress) -> None: ...

    def tokens(self, event: Output) -> None: ...

    def candidate_finished(self, event: CandidateFinished) -> None:
        """Only when several candidates were asked for. May still come for one that was cancelled just now."""
        ...

    def finished(self, event: Finished) -> None: ...

    def failed(self, error: Exception) -> None:
        """The generation ended without a result.

        Unavailable (ENGINE_RESTARTING) says that the engine died, Unavailable (DRAINING) that the link was stopped,
        Internal (ENGINE_FAILED) that the engine could not serve this request, Internal (REQUEST_QUARANTINED) that it
        has ended the engine for the second time or has the context of a turn that did, Internal (SESSION_QUARANTINED)
        that two turns of its session have, ContextLimitExceeded that the context can
        never fit, ResourceExhausted that the engine's queue is full. Anything else was raised by this sink.
        """
        ...


class Generation(Protocol):
    """One running generation, as a handle to stop it."""

    @property
    def request(self) -> RequestKey: ...

    def cancel(self) -> None:
        """Stop within one step; the sink hears nothing more. Never raises, and does nothing after the end."""
        ...

    def cancel_candidate(self, candidate: int) -> None:
        """Stop one of several candidates; ``finished`` still comes when the others have ended. Never raises."""
        ...


class EngineLink(Protocol):
    """One engine."""

    @property
    def info(self) -> EngineReady:
        """What the engine said when it came up. Raises Unavailable (STARTING) before that."""
        ...

    @property
    def state(self) -> LinkState: ...

    @property
    def stats(self) -> Stats:
        """The counters in the engine's latest report."""
        ...

    @property
    def restarts_total(self) -> int:
        """Engines that took the place of one that had died."""
        ...

    @property
    def stalled(self) -> bool:
        """No step has ended for longer than a step of its size can take, while work is waiting (``watchdog``)."""
        ...

    async def start(self) -> None:
        """Bring the engine up; returns when it is ready. Raises Internal with the engine's own words if it cannot."""
        ...

    def submit(self, command: Submit, sink: GenerationSink) -> Generation:
        """Start a generation, whose number in ``command`` is set here.

        A turn (``command.origin``) that has ended the engine twice fails with Internal (REQUEST_QUARANTINED), and is
        refused with it. After two such turns all of the session are refused with Internal (SESSION_QUARANTINED).

        Raises Unavailable (STARTING, ENGINE_RESTARTING, DRAINING) when no engine takes work. Then
        ``sink`` is never called.
        """
        ...

    def choose(self, session: SessionKey, candidate: int) -> None:
        """The session's latest turn is answered by this candidate now, another than 0.

        Never raises. An engine that does not hear it, or has not kept the candidate's KV, computes it again.
        """
        ...

    async def evict(self, session: SessionKey | None = None) -> int:
        """Drop cached KV of one session or of all idle ones; returns the number of tokens dropped."""
        ...

    async def residency(self, session: SessionKey) -> ResidentTokens: ...

    async def read_strips(self) -> list[SessionStrip]:
        """Where the chunks of all cached sessions lie; told in pieces, between which the engine goes on."""
        ...

    async def warm(
        self, session: SessionKey, tokens: TokenArray, *, scope: str = "", qos: TenantQos = DEFAULT_QOS
    ) -> Warmed:
        """Ask for the KV of ``tokens``, a session's whole history, on the device. Answered before it is there."""
        ...

    async def stop(self) -> None:
        """End the engine; running generations fail with Unavailable (DRAINING)."""
        ...


def context_limit(info: EngineReady) -> ContextLimit:
    """A context must be shorter than this, in tokens: the model's limit, or what the device tier holds if less."""
    limit = ContextLimit(min(info.context_limit, info.device_capacity_tokens or info.context_limit))
    if limit < info.model_context_limit:
        limit.note = (
            f"the device tier of the cache sets this limit, not the model, which takes {info.model_context_limit}: a "
            "larger --device-cache raises it"
        )
    return limit
