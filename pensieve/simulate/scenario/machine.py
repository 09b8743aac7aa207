"""Models how long a step takes on the simulated machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from pensieve.config import CacheConfig
from pensieve.engine.cost import CostModel
from pensieve.engine.plan import Plan
from pensieve.engine.worker.hybrid_sizing import cache_groups, explicit_bytes, sizes_for
from pensieve.model.groups import GroupKind, KvGroup

_NO_WINDOW: Final = 1 << 62


class MachineError(ValueError):
    """An unusable machine description; the message says why."""


class MachineGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A KV group of a model that has two (``pensieve.model.groups``)."""

    kind: GroupKind
    layers: int
    layer_bytes: int
    """Bytes in one layer of a token or, in a state group, of a state; all ranks together."""
    window: int = 0
    """Tokens that a token sees, itself included; 0 unless it is a window group."""


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One replica. Seconds of one step that computes q tokens for b requests::

        max(weights_s, q * token_s) + kv_tokens_read * kv_s + pairs * pair_s + b * row_s + fixed_s

    A decode row reads its whole context; a span of several tokens makes (query, key) pairs instead. Both are means
    over the layers that attend: a layer with a window counts no more of a context than its window. Recurrent layers
    are part of ``token_s`` and ``row_s``. Copies from the host overlap layer by layer: a step with copies takes the
    longer of the two plus one layer of the shorter.

    The defaults are a 13B model with 10 KV heads in bfloat16 on one H200, fitted to
    bench/results/engine_13b_h200.md: ``weights_s`` is the floor of a decode step at batch 1; ``kv_s`` the
    slope over batch x context; ``token_s`` and ``pair_s`` the least-squares line through prefills of 512 to
    8192 tokens; the others are the remainder. The formula fits the decode table (batch 1 to 256, context 1024
    and 4096) and the prefill table within 9 %.
    """

    name: str = "llama-2-13b-gqa10 on H200"
    kv_bytes: int = 204_800
    """Bytes of one KV-token, all layers; with ``groups``, those of the full group."""
    groups: tuple[MachineGroup, ...] = ()
    """The full group, then that of windows or states; (): a model with full attention only."""
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
        if self.groups:
            kinds = [group.kind for group in self.groups]
            if len(kinds) != 2 or kinds[0] != "full" or kinds[1] == "full":
                raise MachineError(f"groups {kinds}: a full group, then one of windows or states")
            if any(group.layers < 0 or group.layer_bytes < 0 for group in self.groups):
                raise MachineError("groups: negative layers or bytes")
            if any((group.kind == "window") != (group.window > 0) for group in self.groups):
                raise MachineError(
                    "groups: a window group has a window of at least 1 token, and no other has one"
                )

    def kv_groups(self, chunk_tokens: int) -> tuple[KvGroup, ...]:
        """Return the KV groups with pages for chunks of this size; a page's bytes are those of all ranks."""
        if not self.groups:
            return (KvGroup("full", (0,), self.kv_bytes * chunk_tokens),)
        return tuple(
            KvGroup(
                group.kind,
                tuple(range(group.layers)),
                group.layer_bytes * (1 if group.kind == "state" else chunk_tokens),
                group.window or None,
            )
            for group in self.groups
        )

    def step_seconds(self, *, tokens: float, rows: float, kv_read: float, pairs: float) -> float:
        matrices = max(self.weights_s, tokens * self.token_s)
        return matrices + kv_read * self.kv_s + pairs * self.pair_s + rows * self.row_s + self.fixed_s

    def work_of(self, plan: Plan) -> Work:
        """Return the work of a plan, copies excluded."""
        kv_read, pairs = 0.0, 0.0
        for span in plan.spans:
            if len(span.tokens) == 1:
                kv_read += self._seen(span.end)
            else:
                pairs += self._pairs(span.end) - self._pairs(span.start)
        return Work(plan.num_tokens, len({span.request for span in plan.spans}), kv_read, pairs)

    def copy_seconds(self, num_bytes: float) -> float:
        return num_bytes / self.swap_bytes_per_s

    def seconds_with_copy(self, compute: float, copy: float) -> float:
        """Seconds of a step whose layers wait for their copies one by one."""
        return max(compute, copy) + min(compute, copy) / self.layers

    def cost_model(self, chunk_tokens: int, context_limit: int) -> CostModel:
        """``Cost(l)`` of this machine in seconds, for retention values and the cost of recomputation."""
        top = max(context_limit, chunk_tokens)
        bends = {window for _, window in self._attention if 0 < window < top}
        points = tuple(
            (length, self.pair_s * chunk_tokens * self._seen(length)) for length in sorted({0, top} | bends)
        )
        return CostModel(points, self.token_s * chunk_tokens, chunk_tokens)

    def with_profile(self, cost: CostModel) -> Machine:
        """Return this machine with the compute rates of a cost profile, which has no bandwidths."""
        top = cost.attention[-1][0]
        per_pair = float(cost.attention_cost(top)) / (cost.chunk_tokens * top)
        return msgspec.structs.replace(
            self, name="cost profile", token_s=cost.other / cost.chunk_tokens, pair_s=per_pair
        )

    @property
    def _attention(self) -> list[tuple[float, int]]:
        """(share of the layers that attend, tokens that a token sees there)."""
        attending = [group for group in self.groups if group.kind != "state" and group.layers]
        if not self.groups:
            return [(1.0, _NO_WINDOW)]
        layers = sum(group.layers for group in attending)
        return [(group.layers / layers, group.window or _NO_WINDOW) for group in attending]

    def _seen(self, position: float) -> float:
        """Return how many tokens the token before ``position`` sees, the mean over the layers that attend."""
        return sum(share * min(position, window) for share, window in self._attention)

    def _pairs(self, end: float) -> float:
        """Return the (query, key) pairs of the first ``end`` tokens, the mean over the layers that attend."""
        return sum(
            share * (end * end / 2 if end <= window else window * (end - window / 2))
            for share, window in self._attention
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


def cache_config(
    machine: Machine, device: str, host: str, *, chunk_tokens: int, context_limit: int, **rules: Any
) -> CacheConfig:
    """Return the configuration of both tiers; ``rules``: its other fields. Raises ValueError, with what to change, for
    sizes that cannot be read and for a device tier that does not hold one chunk."""
    groups = machine.kv_groups(chunk_tokens)
    sizes = sizes_for(groups, chunk_tokens, context_limit, ranks=1, on_gpu=machine.overlapped)
    layout = sizes.device_layout(explicit_bytes("device", device, sizes, sizes.device_bytes))
    host_bytes = explicit_bytes("host", host, sizes, sizes.host_bytes)
    shared = len(groups) > 1
    if layout.num_bytes < sizes.device_bytes(chunk_tokens):
        raise ValueError(f"--device-cache {device} does not hold one chunk")
    return CacheConfig(
        device_chunks=sizes.chunks(layout),
        host_chunks=sizes.chunks(sizes.host_layout(host_bytes)),
        chunk_tokens=chunk_tokens,
        groups=cache_groups(groups, layout),
        device_bytes=layout.num_bytes if shared else None,
        host_bytes=host_bytes if shared else None,
        **rules,
    )
