"""What differs between the evaluation on GPUs and in small: models, memory, rates, windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from evaluation.loads import Rates

TIME_SCALE = 0.1
"""Think time here over think time in the paper."""


@dataclass(frozen=True, slots=True)
class Scale:
    """What differs between the evaluation on a GPU and the same experiments in small on any machine."""

    gqa: str
    """Shape of the model with grouped KV heads, without their number."""
    gqa_heads: int
    opt: str
    serve: tuple[str, ...]
    """Options of every Pensieve server."""
    device_tier: str
    host_tier: str
    device_bytes: int
    """The same size for peers, who take bytes."""
    host_bytes: int
    rates: Mapping[tuple[str, str], Rates]
    """(family of the model, dataset) → what is offered."""
    window_s: float
    time_scale: float
    replay: tuple[str, ...]
    start_up_s: tuple[float, float]
    """Guesses: Pensieve, vLLM."""
    ranks: int = 1
    """GPUs of a server. The device tier is that of all together, ``device_bytes`` that of each."""

    def shape(self, kv_heads: int) -> str:
        return f"{self.gqa}-gqa{kv_heads}"


GIB = 1 << 30
FULL = Scale(
    gqa="llama-2-13b", gqa_heads=10, opt="opt-13b",
    serve=("--device", "cuda", "--dtype", "bfloat16", "--max-running", "512", "--max-batch-tokens", "8192"),
    device_tier="40GiB", host_tier="32GiB", device_bytes=40 * GIB, host_bytes=32 * GIB,
    rates={
        ("gqa", "sharegpt"): Rates((26, 20, 23), (17, 15, 13), (7, 10), (20, 17, 23)),
        ("gqa", "ultrachat"): Rates((33, 25, 29), (26, 22, 19), (13, 19), (24, 27, 21)),
        ("opt", "sharegpt"): Rates((13, 9, 16), (13, 9, 16), (12, 8)),
        ("opt", "ultrachat"): Rates((12, 8, 15), (12, 8, 14), (11, 7)),
    },
    window_s=60.0, time_scale=TIME_SCALE,
    replay=("--stop-after-window", "--processes", "4"), start_up_s=(40.0, 50.0),
)  # fmt: skip
SMALL = Scale(
    gqa="tiny-llama", gqa_heads=2, opt="tiny-llama-gqa8",
    serve=("--device", "cpu", "--threads", "1"),
    device_tier="2048tokens", host_tier="2048tokens", device_bytes=8 << 20, host_bytes=8 << 20,
    rates={
        (family, data): Rates((6, 3), (6, 3), (4, 2))
        for family in ("gqa", "opt") for data in ("sharegpt", "ultrachat")
    },
    window_s=3.0, time_scale=TIME_SCALE / 10,
    replay=("--stop-after-window", "--scale-lengths", "0.15", "--max-lag", "60"),
    start_up_s=(6.0, 10.0),
)  # fmt: skip
"""A few seconds per point on one core; that every experiment runs is all that it shows, however busy the machine is."""
TWO_GPUS = replace(
    FULL, gqa="llama-2-70b", gqa_heads=8, opt="", ranks=2, device_tier="80GiB", host_tier="64GiB",
    host_bytes=64 * GIB, rates={("gqa", "sharegpt"): Rates((20, 14, 17), (16, 11), (5, 4))},
    window_s=80.0, time_scale=1 / 6, start_up_s=(70.0, 110.0),
)  # fmt: skip
"""The paper's Figure 11, of Llama-2-70B, whose steps take two to three times as long. The rates are guesses: at 12
turns/s, the most that was tried, a token takes 24.7 ms and nothing is recomputed."""
