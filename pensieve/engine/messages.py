"""What front end and engine say to each other: typed msgpack messages, the same in-process and between processes.

The front end sends a ``Command``, the engine answers with ``Report``s: one per step, holding everything that the
step produced, so that the cost of talking does not grow with the batch. A ``Submit`` carries the *whole* context as
token ids. The engine compares them with what it has cached and keeps the longest common prefix, so its cache can
never disagree with the history: edits, rewinds, turns on other replicas and engine restarts need no message of
their own (4 bytes a token: a context of 32k tokens is 128 KiB on a local socket).

On a socket they travel as ``pensieve.frames``.
"""

from __future__ import annotations

import msgspec

from pensieve.core import DEFAULT_QOS, FinishReason, Hints, Phase, Sampling, TenantQos, TokenLogprob, Usage


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Start a generation. ``session`` keys the cache; ``tokens`` is the whole context, packed uint32."""

    request: int
    """The link numbers it; 0 until then."""
    session: str
    tokens: bytes
    num_new: int
    """How many trailing tokens of ``tokens`` are new: this turn's input, at a session's first turn all. The rest is
    history, whose KV was there once."""
    sampling: Sampling
    scope: str = ""
    """Sessions of one scope share the KV of common beginnings; "": this one shares with nobody."""
    hints: Hints | None = None
    """About the time after the generation."""
    qos: TenantQos = DEFAULT_QOS
    """How it waits."""
    origin: str = ""
    """Names the turn, the same for all its tries, so that the front end finds one that ends engines; "": none."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop a generation; nothing more is reported for it. Unknown requests are ignored: it may just have ended."""

    request: int
    candidate: int | None = None
    """Stop this candidate only; None: all of it."""


class Evict(msgspec.Struct, frozen=True, tag="evict"):
    """Drop the cached KV of one idle session, or of all of them when none is named. Answered by ``Evicted``."""

    call: int
    session: str = ""


class GetResidency(msgspec.Struct, frozen=True, tag="residency"):
    """Where a session's KV-tokens lie. Answered by ``ResidentTokens``."""

    call: int
    session: str


class GetStrips(msgspec.Struct, frozen=True, tag="get_strips"):
    """Say where the chunks of cached sessions lie. Answered by ``Strips``, as far as a bounded time goes.

    ``at``: 0 begins anew; ``Strips.next`` goes on where the answer before has ended.
    """

    call: int
    at: int = 0


class Choose(msgspec.Struct, frozen=True, tag="choose"):
    """The session's turn was answered by another candidate than 0: its KV becomes the session's. Ignored if gone."""

    session: str
    candidate: int


class Warm(msgspec.Struct, frozen=True, tag="warm"):
    """Bring a session's KV to the device ahead of its next turn, if there is room. Answered by ``Warmed``."""

    call: int
    session: str
    tokens: bytes
    """The whole history, packed as in ``Submit``."""
    scope: str = ""
    qos: TenantQos = DEFAULT_QOS


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Leave the loop at the end of the current step."""


Command = Submit | Cancel | Choose | Evict | GetResidency | GetStrips | Warm | Stop


class Output(msgspec.Struct, frozen=True, tag="output"):
    """New output tokens of one request, in order."""

    request: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    candidate: int = 0


class RequestProgress(msgspec.Struct, frozen=True, tag="progress"):
    """A request changed its phase, or moved on inside a long one."""

    request: int
    phase: Phase
    queue_position: int = 0
    tokens_done: int = 0
    tokens_total: int = 0


class CandidateFinished(msgspec.Struct, frozen=True, tag="candidate"):
    """One candidate of a request that has several produced its last token. ``Finished`` follows when all have."""

    request: int
    candidate: int
    reason: FinishReason


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """A request has produced its last token. Stop strings and time limits are the front end's: it cancels."""

    request: int
    reason: FinishReason
    usage: Usage


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A request cannot be served. ``reason``: see docs/errors.md (CONTEXT_LIMIT_EXCEEDED, ENGINE_FAILED and so on)."""

    request: int
    reason: str
    message: str


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A request was admitted: its receipt is known from here on (output and times still zero)."""

    request: int
    usage: Usage


class Evicted(msgspec.Struct, frozen=True, tag="evicted"):
    """Answers ``Evict``: how many KV-tokens were dropped."""

    call: int
    tokens: int


class ResidentTokens(msgspec.Struct, frozen=True, tag="resident"):
    """Answers ``GetResidency``: valid KV-tokens per tier; those on both count for the device."""

    call: int
    device_tokens: int
    host_tokens: int


class SessionStrip(msgspec.Struct, frozen=True, array_like=True):
    """Where a session's chunks lie, in the order of its context."""

    session: str
    tokens: int
    """Length of its context, what runs included."""
    strip: str
    """Runs of chunks in one state, ``x7h40B3d12``: see ``pensieve.engine.strips``."""
    idle_s: float
    """Since its latest turn; 0 while something runs."""
    running: bool
    warming: bool
    """What runs is not a turn, but brings its chunks to the device ahead of one."""
    is_candidate: bool
    """It is a further candidate's."""


class Strips(msgspec.Struct, frozen=True, tag="strips"):
    """Answers ``GetStrips``. ``next``: where to go on; 0: these were the last."""

    call: int
    next: int
    sessions: tuple[SessionStrip, ...]


class Warmed(msgspec.Struct, frozen=True, tag="warmed"):
    """Answers ``Warm``.

    ``refused``: "", or why nothing is brought: ``no_room``, ``running``, ``nothing_to_do``, ``busy``. The tokens are
    those in each tier now.
    """

    call: int
    refused: str
    device_tokens: int
    host_tokens: int


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """First event of an engine: what it can do."""

    context_limit: int
    vocab_size: int
    device: str
    dtype: str
    device_capacity_tokens: int
    host_capacity_tokens: int
    chunk_tokens: int
    uses_hints: bool = False
    """Whether its cache does anything with ``Hints``."""
    model_context_limit: int = 0
    """What ``context_limit`` would be if the device tier were large enough; 0: not told."""


class Stepping(msgspec.Struct, frozen=True, tag="stepping"):
    """A step begins, and is unlike the one before. It comes alone in its report, whose ``stats`` are old.

    ``tokens`` 0: something went wrong outside of a step, by one of ``requests``.
    """

    tokens: int
    requests: tuple[int, ...]


class Stats(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counters since start (``*_total``) and gauges of the engine. Tokens unless named otherwise."""

    steps_total: int = 0
    running: int = 0
    queued: int = 0
    device_free: int = 0
    device_reclaimable: int = 0
    device_used: int = 0
    host_free: int = 0
    host_used: int = 0
    cached_sessions: int = 0
    gpu_cached_total: int = 0
    swapped_in_total: int = 0
    recomputed_total: int = 0
    new_total: int = 0
    output_total: int = 0
    dropped_total: int = 0
    warmed_total: int = 0
    suspensions_total: int = 0
    swap_in_bytes_total: int = 0
    swap_out_bytes_total: int = 0
    swap_in_seconds_total: float = 0.0
    swap_out_seconds_total: float = 0.0
    step_seconds_total: float = 0.0
    last_step_seconds: float = 0.0
    last_batch_tokens: int = 0
    part_seconds_total: dict[str, float] = msgspec.field(default_factory=dict)
    """Where steps spend their time. Parts of the host are ``plan``, ``launch``, ``wait`` (for the device) and
    ``commit``; those of the worker are whatever it measures (on a GPU ``device``, and ``gap`` between two steps)."""
    held: dict[str, tuple[int, int]] | None = None
    """Of each tenant that holds any, by name: tokens that its pages have room for, on the device and on the host. None:
    as in the report before; it is told about twice a second."""


Event = (
    Started
    | Output
    | RequestProgress
    | CandidateFinished
    | Finished
    | Failed
    | Evicted
    | ResidentTokens
    | Strips
    | Warmed
    | EngineReady
    | Stepping
)


class Report(msgspec.Struct, frozen=True):
    """Everything one engine iteration has to say. Also sent, empty, as a heartbeat while idle."""

    events: tuple[Event, ...]
    stats: Stats
