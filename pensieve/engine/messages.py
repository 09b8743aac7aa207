"""Messages between front end and engine: typed msgpack, the same in-process and between processes.

The front end sends a ``Command``, the engine answers with ``Report``s: one per step with everything that the
step produced, so that the cost of communication does not grow with the batch. A ``Submit`` carries the
*whole* context as token ids. The engine compares them with the cached ones and keeps the longest common
prefix, so its cache can never disagree with the history: edits, rewinds, turns on other replicas and engine
restarts need no message of their own (4 bytes a token: a context of 32k tokens is 128 KiB on a local socket).

On a socket they travel as ``pensieve.frames``.
"""

from __future__ import annotations

import msgspec

from pensieve.core import DEFAULT_QOS, FinishReason, Hints, Phase, Sampling, TenantQos, TokenLogprob, Usage


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Start a generation. ``session`` keys the cache; ``tokens`` is the whole context, packed uint32."""

    request: int
    """Set by the link; 0 until then."""
    session: str
    tokens: bytes
    num_new: int
    """Trailing ``tokens`` that are this turn's input: all, at a session's first turn. The rest is history."""
    sampling: Sampling
    scope: str = ""
    """Sessions of one scope share the KV of common beginnings; "": this one shares none."""
    hints: Hints | None = None
    qos: TenantQos = DEFAULT_QOS
    predicted: bytes = b""
    """A guess at the answer, packed as ``tokens``: drafts for it. It never changes the answer."""
    origin: str = ""
    """Identifies the turn across attempts, so that one that crashes engines can be found; "": none."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop a generation without further reports. Unknown requests are ignored: the request may just have ended."""

    request: int
    candidate: int | None = None
    """Stop this candidate only; None: all of them."""


class Evict(msgspec.Struct, frozen=True, tag="evict"):
    """Drop the cached KV of one idle session, or of all of them when none is named. Answered by ``Evicted``."""

    call: int
    session: str = ""


class GetResidency(msgspec.Struct, frozen=True, tag="residency"):
    """Ask where a session's KV-tokens are. Answered by ``ResidentTokens``."""

    call: int
    session: str


class GetStrips(msgspec.Struct, frozen=True, tag="get_strips"):
    """Ask where the chunks of cached sessions are. Answered by ``Strips``, as many as fit a time limit.

    ``at``: 0 starts again; ``Strips.next`` continues after the previous answer.
    """

    call: int
    at: int = 0


class Choose(msgspec.Struct, frozen=True, tag="choose"):
    """Make another candidate's KV the session's: it is the committed answer. Ignored if the KV is gone."""

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


class SetMemory(msgspec.Struct, frozen=True, tag="set_memory"):
    """Set the wanted size of an elastic device tier. Answered by ``Memory`` at once; the held size follows."""

    call: int
    wanted: int | None = None
    """Bytes over all ranks; None: only ask."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Leave the loop at the end of the current step."""


Command = Submit | Cancel | Choose | Evict | GetResidency | GetStrips | Warm | SetMemory | Stop


class Output(msgspec.Struct, frozen=True, tag="output"):
    """New output tokens of one request, in order."""

    request: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    candidate: int = 0
    drafted: int = 0
    """Drafts of this candidate so far, and those accepted: a front end may end the answer before its receipt comes."""
    accepted: int = 0


class RequestProgress(msgspec.Struct, frozen=True, tag="progress"):
    """A request entered a phase, or made progress within a long one."""

    request: int
    phase: Phase
    queue_position: int = 0
    tokens_done: int = 0
    tokens_total: int = 0


class CandidateFinished(msgspec.Struct, frozen=True, tag="candidate"):
    """One of several candidates has produced its last token. ``Finished`` follows when all have."""

    request: int
    candidate: int
    reason: FinishReason


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """A request has produced its last token. Stop strings and time limits are the front end's: it cancels."""

    request: int
    reason: FinishReason
    usage: Usage


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A request cannot be served. ``reason``: see docs/errors.md (such as GRAMMAR_TOO_COSTLY)."""

    request: int
    reason: str
    message: str


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A request was admitted. Its receipt is final except for output and times, which are zero."""

    request: int
    usage: Usage


class Evicted(msgspec.Struct, frozen=True, tag="evicted"):
    """Answers ``Evict``: the number of KV-tokens dropped."""

    call: int
    tokens: int


class ResidentTokens(msgspec.Struct, frozen=True, tag="resident"):
    """Answers ``GetResidency``: valid KV-tokens by tier; a token on both counts for the device."""

    call: int
    device_tokens: int
    host_tokens: int


class SessionStrip(msgspec.Struct, frozen=True, array_like=True):
    """The places of a session's chunks, in the order of its context."""

    session: str
    tokens: int
    """Context length, including the output of a running turn."""
    strip: str
    """Runs of chunks in one state, ``x7h40B3d12``: see ``pensieve.engine.strips``."""
    idle_s: float
    """Seconds since its latest turn; 0 while it runs."""
    running: bool
    warming: bool
    """A warm-up runs, not a turn."""
    is_candidate: bool
    """Belongs to a candidate other than the first."""
    tail: str = ""
    """Slices of the model's windows or states that it has, by place; "" in a model with one KV group."""


class Strips(msgspec.Struct, frozen=True, tag="strips"):
    """Answers ``GetStrips``. ``next``: where to continue; 0: these are the last."""

    call: int
    next: int
    sessions: tuple[SessionStrip, ...]


class Warmed(msgspec.Struct, frozen=True, tag="warmed"):
    """Answers ``Warm``. Token counts are those in each tier now.

    ``refused``: "" or the reason: ``no_room``, ``running``, ``nothing_to_do``, ``busy``.
    """

    call: int
    refused: str
    device_tokens: int
    host_tokens: int


class Memory(msgspec.Struct, frozen=True, tag="memory"):
    """Answers ``SetMemory``: sizes of the device tier, in bytes over all ranks. One size: all four are equal."""

    call: int
    held: int
    """Backed by memory now."""
    wanted: int
    """As the operator last asked; at first the ceiling."""
    floor: int
    ceiling: int
    refused: str = ""
    """Why ``wanted`` was not set, in one line for people; "": it was, or the question was only asked."""


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """First event of an engine: its capabilities."""

    context_limit: int
    vocab_size: int
    device: str
    dtype: str
    device_capacity_tokens: int
    host_capacity_tokens: int
    chunk_tokens: int
    uses_hints: bool = False
    """Whether its cache uses ``Hints``."""
    device_bytes: int = 0
    """Bytes of the device tier over all ranks, which two KV groups share; 0 for a model with one."""
    host_bytes: int = 0
    model_context_limit: int = 0
    """``context_limit`` if the device tier were large enough; 0: unknown."""
    device_floor: int = 0
    """Bytes that an elastic device tier keeps at least, over all ranks."""
    device_ceiling: int = 0
    """Bytes that it holds at most. Equal to ``device_floor``: the tier has one size."""
    speculates: bool = False
    """Whether it makes drafts."""
    numerics: str = ""
    """Dtype and device, with ``invariant`` before them if the bits of a token depend only on the tokens before it, and
    the form of weights where it is another."""
    weights: str = ""
    """Form of the weights in products: ``fp8`` or a dtype. "": unknown, as that of ``kv``."""
    kv: str = ""
    """Form of keys and values."""
    elastic_refusal: str = ""
    """Why a range of sizes was not followed, in one line; "": it was, or none was given."""


class Stepping(msgspec.Struct, frozen=True, tag="stepping"):
    """A step unlike the one before begins. It is alone in its report, whose ``stats`` are old.

    ``tokens`` 0: an error occurred outside of a step, caused by one of ``requests``.
    """

    tokens: int
    requests: tuple[int, ...]


class Stats(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counters since start (``*_total``) and gauges of the engine, in tokens unless named otherwise."""

    steps_total: int = 0
    running: int = 0
    queued: int = 0
    device_free: int = 0
    device_reclaimable: int = 0
    device_used: int = 0
    host_free: int = 0
    host_used: int = 0
    device_held: int = 0
    """Bytes of the device tier that memory backs, over all ranks; also in the next three."""
    device_wanted: int = 0
    device_floor: int = 0
    device_ceiling: int = 0
    cached_sessions: int = 0
    gpu_cached_total: int = 0
    swapped_in_total: int = 0
    recomputed_total: int = 0
    new_total: int = 0
    output_total: int = 0
    dropped_total: int = 0
    warmed_total: int = 0
    suspensions_total: int = 0
    late_masks_total: int = 0
    drafted_total: int = 0
    """Drafts that steps computed, and those that became output."""
    accepted_total: int = 0
    swap_in_bytes_total: int = 0
    swap_out_bytes_total: int = 0
    swap_in_seconds_total: float = 0.0
    swap_out_seconds_total: float = 0.0
    step_seconds_total: float = 0.0
    last_step_seconds: float = 0.0
    last_batch_tokens: int = 0
    part_seconds_total: dict[str, float] = msgspec.field(default_factory=dict)
    """Seconds by part of a step. Parts of the host are ``plan``, ``launch``, ``choose`` (late choices),
    ``wait`` (for the device) and ``commit``; the worker adds its own (on a GPU ``device``, and ``gap`` between two
    steps)."""
    held: dict[str, tuple[int, int]] | None = None
    """Tokens that each tenant's pages have room for, (device, host). None: as before; sent about twice a second."""
    computed_ahead: dict[str, int] | None = None
    """Tokens that warm-ups have computed since start, by tenant. Sent with ``held``."""


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
    | Memory
    | EngineReady
    | Stepping
)


class Report(msgspec.Struct, frozen=True):
    """Everything from one iteration of the engine. Also sent, empty, as a heartbeat while idle."""

    events: tuple[Event, ...]
    stats: Stats
