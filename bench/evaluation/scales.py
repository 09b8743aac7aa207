"""What is offered to a server in an experiment, for how long, and what differs between GPUs and a small run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pensieve.replay.load.generators import CHATS
from pensieve.replay.load.schedule import ENDED_SHARE

HISTORY_S, ANSWER_S = 0.03, 3.0
"""Guesses, rather too long: to compute the history of a conversation; and for an answer."""
TIME_SCALE = 0.1
"""Think time here over think time in the paper."""


@dataclass(frozen=True, slots=True)
class Rates:
    both: tuple[float, ...]
    """Rates for systems that keep history on the device and in host memory."""
    device: tuple[float, ...]
    """Rates for systems that keep it on the device only."""
    none: tuple[float, ...]
    """Rates for systems that keep it nowhere: two are enough, since how much has to be computed does not depend on the
    rate."""
    offload: tuple[float, ...] = ()
    """Rates for a peer with host memory, where ``both`` has not those that it carries."""

    @property
    def highest(self) -> float:
        return max(*self.both, *self.device, *self.none, *self.offload)


@dataclass(frozen=True, slots=True)
class BitRates:
    """Rates by what a server keeps in 8 bits."""

    bf16: tuple[float, ...]
    kv: tuple[float, ...]
    weights: tuple[float, ...]
    both: tuple[float, ...]
    peer: tuple[float, ...]
    """A peer with both."""

    @property
    def highest(self) -> float:
        return max(*self.bf16, *self.kv, *self.weights, *self.both, *self.peer)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is offered, and when it is measured."""

    dataset: str
    """A built-in workload of ``pensieve replay``."""
    think_s: float
    rates: tuple[float, ...]
    """Turns per second, the most telling first: where time is short the last ones are left out."""
    run_in_s: float
    """How long the load has been going on when the replay begins."""
    warm_up_s: float
    window_s: float
    replay: tuple[str, ...] = ()
    """More arguments of ``pensieve replay``."""
    most: float = 0.0
    """The highest rate of all that are compared with this one, if it is not among ``rates``: what is drawn depends on
    it, and all systems get the same conversations."""

    @property
    def measured_s(self) -> float:
        """Seconds from the start of the replay to the end of the window."""
        return self.warm_up_s + self.window_s

    @property
    def point_s(self) -> float:
        """Seconds that one rate is expected to take, without start and end."""
        alive = self.think_s + ANSWER_S
        ended = ENDED_SHARE * self.run_in_s / CHATS[self.dataset].published.turns
        return self.measured_s + HISTORY_S * max(self.rates) * (alive + ended)

    @property
    def conversations(self) -> int:
        """Enough to offer any of the rates until the window ends; a fifth more, since starts are random."""
        turns, rate = CHATS[self.dataset].published.turns, max(self.most, *self.rates)
        return 20 + round(1.2 * rate * (self.run_in_s + self.measured_s) / turns)


@dataclass(frozen=True, slots=True)
class Scale:
    """What differs between the evaluation on a GPU and the same experiments in small on any machine."""

    gqa: str
    """Shape of the model with grouped KV heads, without their number."""
    gqa_heads: int
    opt: str
    others: Mapping[str, str]
    """Family → shape, of other models."""
    serve: tuple[str, ...]
    """Options of every Pensieve server."""
    device_tier: str
    host_tier: str
    device_bytes: int
    """The same size for peers, who take bytes, on each GPU."""
    host_bytes: int
    rates: Mapping[tuple[str, str], Rates]
    """(family of the model, dataset) → what is offered."""
    bits: Mapping[str, BitRates]
    """Dataset → what is offered to the model with grouped KV heads in 8 and in 16 bits."""
    window_s: float
    time_scale: float
    replay: tuple[str, ...]
    start_up_s: tuple[float, float]
    """Guesses: Pensieve, vLLM."""
    gibibytes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Family → GiB of its device and host tiers, where the others' do not fit beside its weights."""
    divided: Mapping[str, int] = field(default_factory=dict)
    """Family → GPUs of one server, where one does not hold its weights; ``gibibytes`` are those of all together."""
    gpus: int = 1

    def of(self, family: str) -> Scale:
        """The scale with the tiers of ``family``."""
        if family not in self.gibibytes:
            return self
        device, host = self.gibibytes[family]
        gpus = self.divided.get(family, 1)
        return replace(
            self, device_tier=f"{device}GiB", host_tier=f"{host}GiB",
            device_bytes=device * GIB // gpus, host_bytes=host * GIB, gpus=gpus,
            start_up_s=(self.start_up_s[0] * (2 * gpus - 1), self.start_up_s[1] * (2 * gpus - 1)),
        )  # fmt: skip

    def shape(self, kv_heads: int) -> str:
        return f"{self.gqa}-gqa{kv_heads}"


GIB = 1 << 30
FULL = Scale(
    gqa="llama-2-13b", gqa_heads=10, opt="opt-13b",
    others={"70b": "llama-2-70b", "gemma3": "gemma-3-12b", "qwen3next": "qwen3-next-20b"},
    serve=("--device", "cuda", "--dtype", "bfloat16", "--max-running", "512", "--max-batch-tokens", "8192"),
    device_tier="40GiB", host_tier="32GiB", device_bytes=40 * GIB, host_bytes=32 * GIB,
    # One GPU of 80 GB holds these beside 22 and 40 GiB of weights.
    gibibytes={"70b": (80, 64), "gemma3": (32, 32), "qwen3next": (20, 20)}, divided={"70b": 2},
    rates={
        ("gqa", "sharegpt"): Rates((26, 20, 23), (17, 19, 15), (7, 10), (20, 17, 23)),
        ("gqa", "ultrachat"): Rates((33, 25, 29), (26, 22, 19), (13, 19), (24, 27, 21)),
        ("opt", "sharegpt"): Rates((13, 9, 16), (13, 9, 16), (12, 8)),
        ("opt", "ultrachat"): Rates((12, 8, 15), (12, 8, 14), (11, 7)),
        ("70b", "sharegpt"): Rates((17, 14, 19, 21), (11, 14), (4, 5), (12, 14, 17)),
        # Guesses, not measured: the first run of these two shows where each system ends.
        ("gemma3", "sharegpt"): Rates((20, 16, 24), (14, 11, 17), (8, 6), (16, 12, 20)),
        ("qwen3next", "sharegpt"): Rates((8, 4, 16), (8, 4, 16), (8, 4), (16, 8, 24)),
    },
    bits={
        "sharegpt": BitRates((20, 16), (26, 21), (26, 21), (44, 36, 40), (26, 20, 23)),
        "ultrachat": BitRates((26, 21), (34, 28), (34, 28), (44, 36, 41), (30, 26, 28)),
    },
    window_s=60.0, time_scale=TIME_SCALE,
    replay=("--stop-after-window", "--processes", "4"), start_up_s=(40.0, 50.0),
)  # fmt: skip
SMALL = Scale(
    gqa="tiny-llama", gqa_heads=2, opt="tiny-llama-gqa8",
    others={"70b": "tiny-llama-gqa8", "gemma3": "tiny-gemma-3", "qwen3next": "tiny-qwen3-next"},
    serve=("--device", "cpu", "--threads", "1"),
    device_tier="2048tokens", host_tier="2048tokens", device_bytes=8 << 20, host_bytes=8 << 20,
    rates={
        (family, data): Rates((6, 3), (6, 3), (4, 2))
        for family, data in (
            ("gqa", "sharegpt"), ("gqa", "ultrachat"), ("opt", "sharegpt"), ("opt", "ultrachat"),
            ("70b", "sharegpt"), ("gemma3", "sharegpt"), ("qwen3next", "sharegpt"),
        )
    },
    bits={data: BitRates(*[(6, 3)] * 5) for data in ("sharegpt", "ultrachat")},
    window_s=3.0, time_scale=TIME_SCALE / 10,
    replay=("--stop-after-window", "--scale-lengths", "0.15", "--max-lag", "60"),
    start_up_s=(6.0, 10.0),
)  # fmt: skip
"""A few seconds per point on one core; that every experiment runs is all that it shows, however busy the machine is."""
