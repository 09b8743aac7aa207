"""Models how long a step takes on the simulated machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from pensieve.engine.cost.model import CostModel
from pensieve.engine.plan import Plan


class MachineError(ValueError):
    """An unusable machine description; the message says why."""


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One replica. Seconds of one step that computes q tokens for b requests::

        max(weights_s, q * token_s) + kv_tokens_read * kv_s + pairs * pair_s + b * row_s + fixed_s

    A decode row reads its whole context; a span of several tokens makes (query, key) pairs instead. Copies
    from the host overlap layer by layer: a step with copies takes the longer of the two plus one layer of the
    shorter.

    The defaults are a 13B model with 10 KV heads in bfloat16 on one H200, fitted to
    bench/results/engine_13b_h200.md: ``weights_s`` is the floor of a decode step at batch 1; ``kv_s`` the
    slope over batch x context; ``token_s`` and ``pair_s`` the least-squares line through prefills of 512 to
    8192 tokens; the others are the remainder. The formula fits the decode table (batch 1 to 256, context 1024
    and 4096) and the prefill table within 9 %.
    """

    name: str = "llama-2-13b-gqa10 on H200"
    kv_bytes: int = 204_800
    """Bytes of one KV-token, all layers."""
    layers: int = 40
    """1: copies do not overlap with computation, as on a CPU."""
    weights_s: float = 5.31e-3
    token_s: float = 3.557e-5
    kv_s: float = 4.56e-8
    pair_s: float = 1.11e-9
    row_s: float = 5e-6
    fixed_s: float = 1.5e-3
    swap_bytes_per_s: float = 50e9
    """Per direction; both directions together do not slow each other (bench/results/ops_swap_h200.md)."""
    overlapped: bool = True
    """The next step is planned and launched while one runs: ``serve --overlapped``, on a GPU."""

    turn_s: float = 0.0
    """Seconds that a server adds to each first token outside its engine: wire, store, tokenizer."""
    mean_error: float | None = None
    """Mean relative error over the steps that ``pensieve profile --machine`` fitted the formula to."""
    worst_error: float | None = None

    def __post_init__(self) -> None:
        numbers = (self.weights_s, self.kv_s, self.pair_s, self.row_s, self.fixed_s, self.turn_s)
        if (
            min(numbers) < 0
            or self.token_s <= 0
            or self.kv_bytes < 1
            or self.layers < 1
            or self.swap_bytes_per_s <= 0
        ):
            raise MachineError(f"impossible machine: {self}")

    def step_seconds(self, *, tokens: float, rows: float, kv_read: float, pairs: float) -> float:
        matrices = max(self.weights_s, tokens * self.token_s)
        return matrices + kv_read * self.kv_s + pairs * self.pair_s + rows * self.row_s + self.fixed_s

    def copy_seconds(self, tokens: int) -> float:
        return tokens * self.kv_bytes / self.swap_bytes_per_s

    def seconds_with_copy(self, compute: float, copy: float) -> float:
        """Seconds of a step whose layers wait for their copies one by one."""
        return max(compute, copy) + min(compute, copy) / self.layers

    def cost_model(self, chunk_tokens: int, context_limit: int) -> CostModel:
        """``Cost(l)`` of this machine in seconds, for retention values and the cost of recomputation."""
        top = max(context_limit, chunk_tokens)
        return CostModel(
            ((0, 0.0), (top, self.pair_s * chunk_tokens * top)), self.token_s * chunk_tokens, chunk_tokens
        )

    def with_profile(self, cost: CostModel) -> Machine:
        """Return this machine with the compute rates of a cost profile, which has no bandwidths."""
        top = cost.attention[-1][0]
        per_pair = float(cost.attention_cost(top)) / (cost.chunk_tokens * top)
        return msgspec.structs.replace(
            self, name="cost profile", token_s=cost.other / cost.chunk_tokens, pair_s=per_pair
        )

    @classmethod
    def from_json(cls, path: Path) -> Machine:
        """Read a machine from JSON; missing fields keep their defaults. Raises MachineError."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError, MachineError) as error:
            raise MachineError(f"{path}: {error}") from error


@dataclass(frozen=True, slots=True)
class Work:
    """Amount of work in one plan, copies excluded."""

    tokens: float
    rows: float
    kv_read: float
    pairs: float


def work_of(plan: Plan) -> Work:
    kv_read, pairs = 0.0, 0.0
    for span in plan.spans:
        if len(span.tokens) == 1:
            kv_read += span.end
        else:
            pairs += len(span.tokens) * (span.start + span.end) / 2
    return Work(plan.num_tokens, len({span.request for span in plan.spans}), kv_read, pairs)
