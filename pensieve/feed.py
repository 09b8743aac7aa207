"""The admin port's document ``/state.json``, written by the server and read by ``pensieve top``: ``docs/page.md``.

Every field but the schema has a default, so documents of older servers can be read.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

SCHEMA: Final = "pensieve.state/1"
MAX_LISTED: Final = 5000


class HttpDoorState(msgspec.Struct, frozen=True):
    state: str = ""
    """``starting``, ``serving``, ``hung``, ``restarting`` or ``draining``."""
    address: str = ""
    """HOST:PORT."""
    since_s: float = 0.0
    """Unix time from which ``state`` holds."""
    restarts: int = 0


class ServerState(msgspec.Struct, frozen=True):
    version: str = ""
    model: str = ""
    replica: str = ""
    problem: str = ""
    """Why calls are not served; "" when they are."""
    device: str = ""
    dtype: str = ""
    weights: str = ""
    """Form of the weights: a dtype or ``fp8``."""
    kv: str = ""
    """Form of keys and values."""
    chunk_tokens: int = 0
    """0 until the engine is up, like the other facts about it."""
    context_limit: int = 0
    shows_text: bool = False
    door: HttpDoorState | None = None
    """None: no HTTP door, or an older server."""


class TierState(msgspec.Struct, frozen=True):
    """Token slots of a tier. ``reclaimable`` slots are in use, but their pages can be taken without a copy."""

    capacity: int = 0
    used: int = 0
    free: int = 0
    reclaimable: int = 0


class MemoryState(msgspec.Struct, frozen=True):
    """Sizes of the device tier in bytes, over all ranks. All are equal for a tier of one size; 0 without an engine."""

    held: int = 0
    """Backed by memory now."""
    wanted: int = 0
    """As the operator last asked."""
    floor: int = 0
    ceiling: int = 0

    @property
    def is_elastic(self) -> bool:
        return self.floor < self.ceiling


class QueueState(msgspec.Struct, frozen=True):
    """Requests in the batch and in the engine's queue; turns waiting for the engine, and their expected wait."""

    running: int = 0
    queued: int = 0
    waiting: int = 0
    expected_wait_s: float = 0.0


class RateState(msgspec.Struct, frozen=True):
    """Rates per second between two polls."""

    over_s: float = 0.0
    steps: float = 0.0
    output_tokens: float = 0.0
    swap_in_bytes: float = 0.0
    swap_out_bytes: float = 0.0
    dropped_tokens: float = 0.0


class Percentiles(msgspec.Struct, frozen=True):
    """Seconds."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float | None = None
    """None: from an older server."""


class ContextSources(msgspec.Struct, frozen=True):
    """Tokens of contexts by the source of their KV."""

    device: int = 0
    host: int = 0
    recomputed: int = 0
    new: int = 0


class RecentSummary(msgspec.Struct, frozen=True):
    """Summary of the turns that ended in the last ``over_s`` seconds."""

    over_s: float = 60.0
    turns: int = 0
    failed: int = 0
    turns_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    first_token_s: Percentiles | None = None
    token_s: Percentiles | None = None
    queue_s: Percentiles | None = None
    context: ContextSources = ContextSources()


class SessionLine(msgspec.Struct, frozen=True):
    session: str = ""
    """``tenant/id``, with ``#n`` appended for the KV of a turn's candidate ``n``."""
    tenant: str = ""
    id: str = ""
    candidate: int = 0
    state: str = ""
    """``running``, ``warming`` or ``idle``."""
    idle_s: float = 0.0
    tokens: int = 0
    strip: str = ""
    tail: str = ""
    """Slices of the model's windows or states, by place; "" in a model without such layers."""
    labels: dict[str, str] | None = None
    """None: not read yet, as for the next two."""
    items: int | None = None
    created_s: float | None = None


class SessionList(msgspec.Struct, frozen=True):
    """Sessions by activity: running ones first, then the most recently run."""

    total: int = 0
    running: int = 0
    age_s: float | None = None
    """Age of the strips; None: no engine serves."""
    first: int = 0
    next: int | None = None
    """``after`` for the next page; None: this is the last page."""
    rows: tuple[SessionLine, ...] = ()


class StateDocument(msgspec.Struct, frozen=True):
    """The answer to ``/state.json``."""

    schema: str
    time_s: float = 0.0
    """Unix time."""
    server: ServerState = ServerState()
    device: TierState = TierState()
    host: TierState = TierState()
    device_memory: MemoryState = MemoryState()
    queue: QueueState = QueueState()
    totals: dict[str, Any] = {}
    """The engine's ``Stats`` since it started."""
    engine_restarts: int = 0
    rates: RateState | None = None
    """None: there was no earlier poll, or it was too recent."""
    lately: RecentSummary = RecentSummary()
    sessions: SessionList = SessionList()
