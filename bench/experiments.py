"""The evaluation as a table: which systems meet which load, in each experiment. ``bench/evaluate.py`` runs them.

Time is scaled. The paper's users think for 60 s on average (EuroSys §6.1), and a load is steady only after several
of their turns: minutes for each point of a curve. Users here think for 6 s. What that does:

* Idle sessions hold r · T · q · c tokens (r turns/s, think time T, q the share of turns that another one follows, c the
  mean context then): a tenth of the tokens, so a tenth of the room for *idle* KV is as tight as all of it at 60 s.
* Running requests hold what they hold: their number follows from r and the time of an answer, and both stay.

So tiers of D and H bytes, of which running requests hold R, stand for a device tier of R + 10 (D − R) and a host tier
of 10 H at 60 s. At the limit of throughput R reaches D, and 40 GiB are the 40 GB that the paper gives each system;
where little runs they stand for more, for every system alike. 32 GiB of host memory stand for 320 GiB (the paper:
220 GB). Curves at one tenth of the think time are therefore comparable with each other, and as to think time with
the paper's; they say nothing of a server that idles for minutes.

A load that begins with nothing takes as long as its conversations to become steady. A replay therefore begins as if it
had run for 7.5 think times (``--run-in``), and warms up while the histories from before are computed. That is a
compromise: beginning later, the load would be steadier, but all systems would meet more history that none has cached.
What is offered then still rises a little in the window, for all systems alike, and histories are somewhat short.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import get_args

from pensieve.config import EngineTuning, PolicyName
from pensieve.replay.generators import CHATS

TIME_SCALE = 0.1
"""Think time here over think time in the paper."""
THINK_S = 60.0
"""The paper's, where it is not varied."""
RUN_IN_THINKS = 7.5
"""A replay begins so many think times after the start of its load."""
THINK_TIMES_S = (15.0, 60.0, 150.0, 300.0, 600.0)
CHUNK_TOKENS = (8, 16, 32, 64, 128, 256)
KV_HEADS = (40, 20, 10, 8)
DEFAULTS = EngineTuning()
NO_HOST_TIER = ("--host-cache", "0")
STATELESS = ("--stateless", *NO_HOST_TIER)
"""Without a host tier, which would still take in the requests that are suspended: a peer without one has to compute
them again."""
OFFLOAD_COMPILE_S, OFFLOAD_PIN_S = 35.0, 0.7
"""Guesses: with offload vLLM's start takes so much longer the first time, and for each GiB that it pins."""


@dataclass(frozen=True, slots=True)
class System:
    """A server by its command line.

    Its words may hold ``{python}``, ``{model}`` (a folder), ``{context}`` (tokens), ``{port}`` and ``{scratch}`` (a
    folder of its own).
    """

    name: str
    command: tuple[str, ...]
    start_up_s: float
    """A guess to plan with, rather too long: what is cut off at the end of the time is lost."""
    url: str = ""
    """Where it answers when it is up; empty: it prints the ready line of ``pensieve serve``."""
    environment: tuple[tuple[str, str], ...] = ()
    host_bytes: int = 0
    """Of its host tier."""


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

    @property
    def point_s(self) -> float:
        """Of one rate, without start and end."""
        return self.warm_up_s + self.window_s

    @property
    def conversations(self) -> int:
        """Enough to offer any of the rates until the window ends; a fifth more, since starts are random.

        The same for all rates: what is drawn depends on it, and jobs that leave out a rate get the same work.
        """
        turns = CHATS[self.dataset].published.turns
        return 20 + round(1.2 * max(self.rates) * (self.run_in_s + self.point_s) / turns)


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: a system with a model under a load."""

    label: str
    system: System
    model: str
    """A shape of ``bench/dummy_model.py``, or ``demo``."""
    workload: Workload


@dataclass(frozen=True, slots=True)
class Experiment:
    name: str
    shows: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Scale:
    """What differs between the evaluation on a GPU and the same experiments in small on any machine."""

    gqa: str
    """Shape of the model with grouped KV heads, without their number."""
    gqa_heads: int
    opt: str
    serve: tuple[str, ...]
    """Of every Pensieve server."""
    device_tier: str
    host_tier: str
    device_bytes: int
    """The same size for peers, who take bytes."""
    host_bytes: int
    rates: Mapping[tuple[str, str], tuple[float, ...]]
    """(family of the model, dataset) → offered turns/s."""
    warm_up_s: float
    window_s: float
    time_scale: float
    replay: tuple[str, ...]
    start_up_s: tuple[float, float]
    """Guesses: Pensieve, vLLM."""

    def shape(self, kv_heads: int) -> str:
        return f"{self.gqa}-gqa{kv_heads}"


GIB = 1 << 30
FULL = Scale(
    gqa="llama-2-13b", gqa_heads=10, opt="opt-13b",
    serve=("--device", "cuda", "--dtype", "bfloat16", "--max-running", "512", "--max-batch-tokens", "8192"),
    device_tier="40GiB", host_tier="32GiB", device_bytes=40 * GIB, host_bytes=32 * GIB,
    rates={
        ("gqa", "sharegpt"): (30, 60, 45, 15), ("gqa", "ultrachat"): (25, 45, 35, 12),
        ("opt", "sharegpt"): (10, 20, 15, 5), ("opt", "ultrachat"): (8, 16, 12, 4),
    },
    warm_up_s=24.0, window_s=22.0, time_scale=TIME_SCALE,
    replay=("--stop-after-window", "--processes", "4"), start_up_s=(40.0, 50.0),
)  # fmt: skip
SMALL = Scale(
    gqa="tiny-llama", gqa_heads=2, opt="tiny-llama-gqa8",
    serve=("--device", "cpu", "--threads", "1"),
    device_tier="2048tokens", host_tier="2048tokens", device_bytes=8 << 20, host_bytes=8 << 20,
    rates={(family, data): (6, 3) for family in ("gqa", "opt") for data in ("sharegpt", "ultrachat")},
    warm_up_s=1.0, window_s=3.0, time_scale=TIME_SCALE / 10, 
    replay=("--stop-after-window", "--scale-lengths", "0.15", "--max-lag", "60"),
    start_up_s=(6.0, 10.0),
)  # fmt: skip
"""A few seconds per point on one core; that every experiment runs is all that it shows, however busy the machine is."""


def experiments(scale: Scale) -> dict[str, Experiment]:
    """All experiments, by name."""
    found = [*_systems(scale), *_ablations(scale)]
    return {experiment.name: experiment for experiment in found}


def pensieve(scale: Scale, name: str, *arguments: str) -> System:
    """``pensieve serve``; an option in ``arguments`` replaces the same one of all. History is on disk, as in use.

    Without a grace for callers who may come back: turns that the client drops must not run on in the next measurement.
    """
    command = (
        "{python}", "-P", "-m", "pensieve", "serve", "--model", "{model}", "--listen", "127.0.0.1:0",
        "--store", "sqlite:///{scratch}/history.sqlite3", "--load-format", "dummy", *scale.serve,
        "--disconnect-grace", "0", "--device-cache", scale.device_tier, "--host-cache", scale.host_tier, *arguments,
    )  # fmt: skip
    host_bytes = 0 if command[-2:] == NO_HOST_TIER else scale.host_bytes
    return System(name, command, scale.start_up_s[0], host_bytes=host_bytes)


def vllm(scale: Scale, name: str, *arguments: str, host_gib: float = 0.0) -> System:
    """``vllm serve`` with as much KV memory as Pensieve, the same limits of a batch, and tokens in and out as ids.

    The development mode lets the replay empty the prefix cache between two rates.
    """
    offload = (
        ("--kv-offloading-size", f"{host_gib:g}", "--kv-offloading-backend", "native") if host_gib else ()
    )
    command = (
        "vllm", "serve", "{model}", "--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "{context}",
        "--max-num-seqs", "512", "--max-num-batched-tokens", "8192", "--kv-cache-memory-bytes",
        str(scale.device_bytes), "--host", "127.0.0.1", "--port", "{port}", "--disable-uvicorn-access-log",
        "--enable-prompt-tokens-details", *arguments, *offload,
    )  # fmt: skip
    start_up_s = scale.start_up_s[1] + (OFFLOAD_COMPILE_S + OFFLOAD_PIN_S * host_gib if host_gib else 0.0)
    environment = (("VLLM_SERVER_DEV_MODE", "1"),)
    return System(name, command, start_up_s, "http://127.0.0.1:{port}", environment, round(host_gib * GIB))


def _workload(scale: Scale, family: str, dataset: str, paper_think_s: float = THINK_S) -> Workload:
    """The warm-up grows with the think time: most sessions must have come back once before it counts."""
    think_s = paper_think_s * scale.time_scale
    return Workload(
        dataset, think_s, scale.rates[family, dataset], RUN_IN_THINKS * think_s,
        max(scale.warm_up_s, 2.5 * think_s), scale.window_s, scale.replay,
    )  # fmt: skip


def _lines(model: str, workload: Workload, systems: Iterable[System]) -> tuple[Line, ...]:
    return tuple(Line(system.name, system, model, workload) for system in systems)


def _systems(scale: Scale) -> Iterable[Experiment]:
    """The paper's Figure 10 with today's peer."""
    systems = (
        pensieve(scale, "Pensieve"),
        pensieve(scale, "Pensieve (GPU cache)", *NO_HOST_TIER),
        pensieve(scale, "Pensieve stateless", *STATELESS),
        vllm(scale, "vLLM", "--no-enable-prefix-caching"),
        vllm(scale, "vLLM prefix caching", "--enable-prefix-caching"),
        vllm(scale, "vLLM CPU offload", "--enable-prefix-caching", host_gib=scale.host_bytes / GIB),
    )
    models = {"13b": ("gqa", scale.shape(scale.gqa_heads)), "opt13b": ("opt", scale.opt)}
    for short, (family, model) in models.items():
        for dataset in ("sharegpt", "ultrachat"):
            yield Experiment(
                f"systems-{short}-{dataset}",
                f"latency against throughput of all systems, {model}, {dataset} (EuroSys figure 10)",
                _lines(model, _workload(scale, family, dataset), systems),
            )


def _ablations(scale: Scale) -> Iterable[Experiment]:
    """One idea of Pensieve each, on the ShareGPT-like load, at the two highest rates: below them nothing is dropped.

    The default is written without options: it is then one and the same job in all of them.
    """
    model = scale.shape(scale.gqa_heads)
    pressed = _pressed(_workload(scale, "gqa", "sharegpt"))

    def ablation(name: str, shows: str, variants: Mapping[str, tuple[str, ...]]) -> Experiment:
        systems = (pensieve(scale, label, *arguments) for label, arguments in variants.items())
        return Experiment(f"ablate-{name}", shows, _lines(model, pressed, systems))

    yield ablation("tiers", "what each tier of the cache is worth", {
        "both tiers": (), "device tier only": NO_HOST_TIER, "stateless": STATELESS,
    })  # fmt: skip
    yield ablation("policy", "what is evicted first (EuroSys figure 14)", {
        name: () if name == DEFAULTS.policy else ("--policy", name) for name in get_args(PolicyName)
    })  # fmt: skip
    yield ablation("unified", "prefill and decode in one step, or in steps of their own (EuroSys figure 13)", {
        "unified": (), "separate": ("--no-unified-batch",),
    })  # fmt: skip
    yield ablation("swap-in", "computing while layers are still copied in, or after", {
        "pipelined": (), "blocking": ("--no-pipelined-swap-in",),
    })  # fmt: skip
    yield ablation("swap-out", "copying out ahead of time, or when a slot is needed", {
        "ahead of time": (), "on demand": ("--swap-watermark", "0"),
    })  # fmt: skip
    yield ablation("chunk", "tokens per chunk", {
        f"{tokens} tokens": () if tokens == DEFAULTS.chunk_tokens else ("--chunk-tokens", str(tokens))
        for tokens in CHUNK_TOKENS
    })  # fmt: skip
    yield _think(scale, model)
    yield _kv_heads(scale)


def _pressed(workload: Workload) -> Workload:
    return replace(workload, rates=tuple(sorted(workload.rates, reverse=True)[:2]))


def _think(scale: Scale, model: str) -> Experiment:
    lines = []
    for paper_s in THINK_TIMES_S:
        load = _pressed(_workload(scale, "gqa", "sharegpt", paper_s))
        lines.append(Line(f"think time {paper_s:g} s", pensieve(scale, "Pensieve"), model, load))
    stateless = pensieve(scale, "Pensieve stateless", *STATELESS)
    lines.append(Line(f"stateless, think time {THINK_TIMES_S[-1]:g} s", stateless, model, lines[-1].workload))
    return Experiment("ablate-think", "how long users think (EuroSys figure 15)", tuple(lines))


def _kv_heads(scale: Scale) -> Experiment:
    """At the two lowest rates: with as many KV heads as queries have, the tiers hold a quarter of the tokens."""
    workload = _workload(scale, "gqa", "sharegpt")
    workload = replace(workload, rates=tuple(sorted(workload.rates, reverse=True)[-2:]))
    systems = {"": pensieve(scale, "Pensieve"), ", stateless": pensieve(scale, "stateless", *STATELESS)}
    counts = KV_HEADS if scale is FULL else (8, 2)
    lines = (
        Line(f"{heads} KV heads{suffix}", system, scale.shape(heads), workload)
        for heads in counts
        for suffix, system in systems.items()
    )
    return Experiment(
        "ablate-kv-heads", "KV heads that queries share, with the cache and without", tuple(lines)
    )
