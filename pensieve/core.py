"""Values that all parts of Pensieve share. No torch, no grpc, no I/O.

Values that cross a process boundary or reach the store are ``msgspec.Struct``s, the others dataclasses; both are
frozen. Token ids travel as little-endian ``uint32`` bytes (``pack_tokens``, ``unpack_tokens``, ``packed_length``).
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal, NewType, TypedDict, get_args, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt

SessionKey = NewType("SessionKey", str)
"""``<tenant>/<session id>``: identifies a session inside the server."""

RequestKey = NewType("RequestKey", int)
"""Identifies one generation attempt; made by the server. Never a client's request id: those may repeat."""

MAX_CANDIDATES: Final = 16
"""Most candidates of a turn, and the greatest width of a beam search."""

MAX_PREDICTION_CHARS: Final = 1 << 16
"""Longest prediction of an answer."""

TokenArray = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Role(enum.IntEnum):
    """The author of an item; numbers as in ``pensieve.v1.Role``."""

    SYSTEM = 1
    USER = 2
    ASSISTANT = 3
    TOOL = 4


class FinishReason(enum.IntEnum):
    """Why a turn ended; numbers as in ``pensieve.v1.FinishReason``."""

    EOS = 1
    STOP_SEQUENCE = 2
    STOP_TOKEN = 3
    LENGTH = 4
    CONTEXT_FULL = 5
    TIME_LIMIT = 6
    CANCELLED = 7


class Phase(enum.IntEnum):
    """The phase of a turn; numbers as in ``pensieve.v1.TurnProgress.Phase``."""

    QUEUED = 1
    RESTORING = 2
    PREFILL = 3
    DECODE = 4
    COMMIT = 5


class CandidateChoice(enum.IntEnum):
    """Which candidate a turn commits; numbers as in ``pensieve.v1.CandidateChoice``."""

    FIRST = 1
    BEST_LOGPROB = 2
    """Highest mean log-probability per output token."""


@dataclass(frozen=True, slots=True)
class SamplingField:
    """A row of the table of sampling parameters (``SamplingOptions``), next to its name, type and meaning.

    Validation, message conversion, session defaults, the SDK's hints at wrong names and the fields of HTTP
    bodies follow the rows. A new parameter needs its field in the contract, a line in each of the three
    classes below, and its mathematics.
    """

    low: float | None = None
    """Least value of a number; None: the least of its type."""
    high: float | None = None
    low_exclusive: bool = False
    """``low`` itself is refused."""
    unless_zero: float = 0.0
    """Least value other than 0."""
    limit: str = ""
    """Server limit that replaces ``high``."""
    aliases: tuple[str, ...] = ()
    """Names that other programs use for it."""
    http: str = ""
    """Its name in all HTTP bodies that ask for an answer; empty: endpoints differ."""
    beams: Literal["", "replace", "refuse"] = ""
    """``replace``: a turn with beams does not inherit it, beam search replaces it. ``refuse``: they
    contradict each other."""
    kind: Any = None
    """The type annotation of the field."""


_MOST: Final = (1 << 31) - 1
Choice = Literal["first", "best_logprob"]


class SamplingOptions(TypedDict, total=False):
    """How tokens are drawn. Values left out come from the session's defaults, then from the server's."""

    temperature: Annotated[
        float, SamplingField(0.0, 10.0, unless_zero=0.01, http="temperature", beams="replace")
    ]
    """0 is greedy; else at least 0.01: lower is surer, higher is wilder."""
    top_p: Annotated[float, SamplingField(0.0, 1.0, low_exclusive=True, http="top_p")]
    """Draw from the most likely tokens that together have this probability; 1 is off."""
    top_k: Annotated[int, SamplingField(0, _MOST, http="top_k")]
    """Draw from this many of the most likely tokens; 0 is off."""
    min_p: Annotated[float, SamplingField(0.0, 1.0, http="min_p")]
    """Draw from the tokens that are at least this probable, as a part of the most likely one's; 0 is off."""
    candidates: Annotated[
        int,
        SamplingField(
            1,
            MAX_CANDIDATES,
            limit="max_candidates",
            aliases=("best_of", "n", "num_return_sequences"),
            beams="replace",
        ),
    ]
    """Answers to draw; all are streamed, one is committed."""
    candidate_choice: Annotated[Choice, SamplingField()]
    """Which one is committed: the first, or the one with the highest mean log-probability per token."""
    repetition_penalty: Annotated[
        float,
        SamplingField(
            0.0,
            10.0,
            low_exclusive=True,
            aliases=("repeat_penalty",),
            http="repetition_penalty",
            beams="replace",
        ),
    ]
    """Divides the scores of tokens that are in the context already; 1 is off."""
    frequency_penalty: Annotated[float, SamplingField(-2.0, 2.0, http="frequency_penalty", beams="replace")]
    """Taken off a token's score for each time it is in the answer already; 0 is off."""
    presence_penalty: Annotated[float, SamplingField(-2.0, 2.0, http="presence_penalty", beams="replace")]
    """Taken off a token's score once it is in the answer; 0 is off."""
    seed: Annotated[int, SamplingField(http="seed")]
    """Seed of the random draws; left out: one is chosen and returned as ``Turn.seed``."""
    stop: Annotated[
        str | Sequence[str], SamplingField(aliases=("stop_sequences", "stop_strings"), beams="refuse")
    ]
    """End the answer before this text, or any of these."""
    stop_token_ids: Annotated[Sequence[int], SamplingField(http="stop_token_ids")]
    """End the answer with any of these tokens."""
    ignore_eos: Annotated[bool, SamplingField(http="ignore_eos")]
    """Go on past the model's own end of an answer."""
    logit_bias: Annotated[Mapping[int, float], SamplingField(beams="refuse")]
    """Added to the scores of these token ids."""
    max_output_tokens: Annotated[
        int,
        SamplingField(
            1,
            _MOST,
            aliases=(
                "max_completion_tokens",
                "max_length",
                "max_new_tokens",
                "max_tokens",
                "n_predict",
                "num_predict",
            ),
        ),
    ]
    """End the answer after this many tokens, as LENGTH; left out: when the model ends it or the context is full."""
    min_output_tokens: Annotated[
        int,
        SamplingField(0, _MOST, aliases=("min_new_tokens", "min_tokens"), http="min_tokens", beams="refuse"),
    ]
    """Ignore the model's end of answer and stop tokens before this many tokens."""
    beam_width: Annotated[
        int, SamplingField(1, MAX_CANDIDATES, limit="max_beam_width", aliases=("num_beams",))
    ]
    """Above 1: beam search. The answer comes whole, at the end."""
    length_penalty: Annotated[float, SamplingField(-10.0, 10.0)]
    """Beam search: above 0 favours longer answers, below 0 shorter ones."""
    early_stopping: Annotated[bool, SamplingField()]
    """Beam search: end with the first ``beam_width`` finished answers."""


def _table() -> dict[str, SamplingField]:
    rows = {}
    for name, hint in get_type_hints(SamplingOptions, include_extras=True).items():
        kind, field = get_args(hint)
        rows[name] = replace(field, kind=kind)
    return rows


SAMPLING: Final = _table()


class SamplingDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling values that a session or a turn sets; None and empty mean "not set here"."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    max_output_tokens: int | None = None
    min_output_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    logit_bias: dict[int, float] = {}
    candidates: int | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    candidate_choice: CandidateChoice | None = None


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """A grammar that the output follows from its first token to its end: thought, calls and answer."""

    text: str
    """In llguidance's own form: what ``LLMatcher.grammar_from_lark`` returns (JSON)."""
    step_items: int = 2000
    """Most parser items for one token (``LLParserLimits.step_max_items``): 2,000 for schemas, 500 for patterns and
    grammars that a caller wrote."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """Sampling parameters of one turn, fully resolved. Each default is neutral: it has no effect."""

    temperature: float = 0.0
    """0 is greedy: the token with the largest logit, the lowest id on a tie."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    max_output_tokens: int | None = None
    min_output_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    top_logprobs: int | None = None
    """None: no logprobs; 0: of the chosen token only."""
    candidates: int = 1
    """Candidate ``i`` samples with ``seed + i`` modulo 2^64."""
    beam_width: int = 1
    """Above 1: beam search, as ``transformers`` defines it with ``num_beams``."""
    length_penalty: float = 1.0
    early_stopping: bool = False
    grammar: Grammar | None = None
    """Only tokens that the grammar allows are chosen; None: any. Not together with beams."""

    @functools.cached_property
    def needs_context(self) -> bool:
        """Whether the next token depends on earlier token ids, other than through the model. Cached like ``plain``."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @functools.cached_property
    def plain(self) -> bool:
        """Whether each token is simply the one with the largest logit. Cached: each step asks for it for each row."""
        return not (
            self.temperature > 0.0
            or self.needs_context
            or self.logit_bias
            or self.min_output_tokens
            or self.grammar is not None
            or self.top_logprobs is not None
        )

    @functools.cached_property
    def bias(self) -> tuple[Ints, Floats]:
        """Token ids and values of ``logit_bias``, int64 and float64 [n], by id. Cached: each step asks for them."""
        pairs = sorted(self.logit_bias.items())
        return np.array([token for token, _ in pairs], np.int64), np.array(
            [value for _, value in pairs], float
        )


class Hints(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A client's expectations about a session after a turn. The cache may use them; they pin nothing."""

    next_turn_s: float | None = None
    """Expected seconds from the end of the turn to the next one; None: unknown."""
    importance: float = 1.0
    """Value of the session's cached state relative to any other's."""
    finished: bool = False
    """No further turn is expected."""


class TenantQos(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request's tenant, and how the tenant is treated in the engine's queue and cache."""

    tenant: str = ""
    """All requests of one sharing scope belong to one tenant."""
    weight: float = 1.0
    """The tenant's part of a loaded engine relative to other tenants' weights; above 0."""
    priority: int = 0
    """Within the tenant only: each level counts as ``HEAD_START_S`` of waiting."""
    cache_share: float = 0.0
    """Fraction of each cache tier, 0 to 1, below which the tenant's chunks are not evicted for other tenants."""


DEFAULT_QOS: Final = TenantQos()
"""For requests without tenants."""

HEAD_START_S: Final = 10.0
"""Seconds of waiting that one level of priority is worth."""


class HintReceipt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The hints of a turn as accepted: None or False if not given or ``ignored``."""

    next_turn_s: float | None = None
    importance: float | None = None
    finished: bool = False
    ignored: tuple[str, ...] = ()
    """Hints that had no effect, by their names in ``pensieve.v1.TurnHints``."""


class ContextLimit(int):
    """A number of tokens that every context must stay below; ``note`` says what sets it and how to raise it."""

    note: str = ""


class TokenText(msgspec.Struct, frozen=True, array_like=True):
    """The text of a token."""

    piece: bytes = b""
    """Bytes that it adds to the text, perhaps part of a character; empty for control tokens."""
    name: str = ""
    """Name of a control token, else empty."""

    @property
    def text(self) -> str:
        """Readable form: bytes that are no whole character are shown as ``\\xf0\\x9f``."""
        return self.name or self.piece.decode("utf-8", "backslashreplace")


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of a chosen token: natural logarithm of the softmax of the raw logits, at temperature 1."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely (token id, logprob) pairs, best first."""
    token: TokenText = TokenText()
    """Empty until looked up; always empty in an engine."""
    top_tokens: tuple[TokenText, ...] = ()
    """Texts of ``top``, in its order."""


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Receipt of one turn. ``context_tokens = gpu_cached + swapped_in + recomputed + new_tokens``, exactly."""

    context_tokens: int = 0
    """Tokens before the generation: live history plus this turn's input."""
    new_tokens: int = 0
    """Computed tokens of this turn's input, template glue included; at a session's first turn, of all."""
    gpu_cached_tokens: int = 0
    swapped_in_tokens: int = 0
    recomputed_tokens: int = 0
    output_tokens: int = 0
    drafted_tokens: int = 0
    """Drafts that steps of the answer computed, and those of them that became output."""
    accepted_tokens: int = 0
    queue_s: float = 0.0
    restore_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def reconciles(self) -> bool:
        """Whether the sources of the context add up to it."""
        return self.context_tokens == (
            self.gpu_cached_tokens + self.swapped_in_tokens + self.recomputed_tokens + self.new_tokens
        )


_PACKED: Final = np.dtype("<u4")


def pack_tokens(tokens: Iterable[int] | TokenArray) -> bytes:
    """Return token ids as little-endian uint32 bytes."""
    array = tokens if isinstance(tokens, np.ndarray) else np.fromiter(tokens, dtype=np.int64)
    return array.astype(_PACKED).tobytes()


def unpack_tokens(data: bytes) -> TokenArray:
    """Return the inverse of ``pack_tokens``: a new int32 array [n]."""
    return np.frombuffer(data, dtype=_PACKED).astype(np.int32)


def packed_length(data: bytes) -> int:
    """Return the number of token ids in ``data``, as packed by ``pack_tokens``."""
    return len(data) // _PACKED.itemsize


def common_prefix(a: TokenArray, b: TokenArray) -> int:
    """Return the length of the longest common prefix of two token arrays."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
