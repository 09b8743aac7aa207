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
had run for 20 think times (``--run-in``): more than two mean conversations, after which the load is within 10 % of its
end. Histories are played beforehand, also those of conversations that have ended, so that servers which keep them have
them; a warm-up of four think times fills the batches.

Systems meet different rates: each from where it has room to near the most that it carries for long, with the GQA model
and a cache as the simulator predicts it (``results/figure10.md``), else as it was measured. Beyond that a system has no
steady state: what is measured there depends on when one looks, and a cache with more room takes longer to be overrun,
which looks like an advantage. Near it, queues and cache swing for a minute: hence windows of ten think times. Curves
are compared at equal latency.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

from evaluation.scales import FULL, GIB, Rates, Scale, Workload

from pensieve.config import EngineTuning, PolicyName

THINK_S = 60.0
"""The paper's, where it is not varied."""
RUN_IN_THINKS = 20.0
"""A replay begins so many think times after the start of its load."""
THINK_TIMES_S = {15.0: (36, 28), 60.0: (26, 23), 150.0: (22, 18), 300.0: (16, 12), 600.0: (12, 9)}
"""The paper's figure 15; think time in the paper's seconds → turns/s. The longer the pauses, the sooner the cache is
too small and recomputation sets the limit."""
PRESSED_THINK_S = 150.0
"""Think time of the eviction policies' load: with ``THINK_S`` these tiers lose a few per cent of the context below the
limit, whatever the policy; with this a fifth to a third (in simulation, steady)."""
CHUNK_TOKENS = (8, 16, 32, 64, 128, 256)
KV_HEADS = {40: (9, 6), 20: (16, 12), 10: (26, 20, 23), 8: (26, 23)}
"""KV heads → turns/s; with as many KV heads as queries have, the tiers hold a quarter of the tokens. The lines of 10
are lines of ``systems-13b-sharegpt``."""
DEFAULTS = EngineTuning()
NO_HOST_TIER = ("--host-cache", "0")
STATELESS = ("--stateless", *NO_HOST_TIER)
"""Without a host tier, which would still take in the requests that are suspended: a peer without one has to compute
them again."""
PEER_OPTIONS = {"qwen3next": ("--gdn-prefill-backend", "triton")}
"""Family → vLLM's options for it. Its default on Hopper, FlashInfer's kernel, is compiled when it is first used."""
PEER_FUSIONS = '{{"pass_config": {{"fuse_allreduce_rms": false}}}}'
"""On several GPUs this fusion needs a compiler at its start, and gains nothing at two (vLLM's pull request 22086)."""
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
    """Where the server answers when it is up; empty: it prints the ready line of ``pensieve serve``."""
    environment: tuple[tuple[str, str], ...] = ()
    host_bytes: int = 0
    """Size of its host tier."""


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
    """Curves that belong into one picture."""

    name: str
    shows: str
    lines: tuple[Line, ...]


def experiments(scale: Scale) -> dict[str, Experiment]:
    all_of_them = (*_systems(scale), *_bits(scale), *_ablations(scale))
    return {experiment.name: experiment for experiment in all_of_them}


def pensieve(scale: Scale, name: str, *arguments: str) -> System:
    """``pensieve serve``; an option in ``arguments`` replaces the same one of all. History is on disk, as in use.

    Without a grace for callers who may come back: turns that the client drops must not run on in the next measurement.
    Nobody is refused, however long the queue: a saturated system is measured by how long its callers wait.
    """
    command = (
        "{python}", "-P", "-m", "pensieve", "serve", "--model", "{model}", "--listen", "127.0.0.1:0",
        "--admin", "127.0.0.1:0", "--store", "sqlite:///{scratch}/history.sqlite3", "--load-format", "dummy",
        *scale.serve, *(("--tensor-parallel", str(scale.gpus)) if scale.gpus > 1 else ()),
        "--disconnect-grace", "0", "--max-wait", "0", "--device-cache", scale.device_tier,
        "--host-cache", scale.host_tier, *arguments,
    )  # fmt: skip
    host_bytes = 0 if command[-2:] == NO_HOST_TIER else scale.host_bytes
    return System(name, command, scale.start_up_s[0], host_bytes=host_bytes)


def vllm(
    scale: Scale, name: str, *arguments: str, offload: Callable[[int], tuple[str, ...]] | None = None
) -> System:
    """``vllm serve`` with as much KV memory as Pensieve, the same limits of a batch, and tokens in and out as ids.

    The development mode lets the replay empty the prefix cache between two rates. ``offload``: options for a host tier
    of so many bytes, which is then as large as Pensieve's.
    """
    host_bytes = scale.host_bytes if offload else 0
    command = (
        "vllm", "serve", "{model}", "--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "{context}",
        "--max-num-seqs", "512", "--max-num-batched-tokens", "8192", "--kv-cache-memory-bytes",
        str(scale.device_bytes), "--host", "127.0.0.1", "--port", "{port}", "--disable-uvicorn-access-log",
        "--enable-prompt-tokens-details", *arguments, *(offload(host_bytes) if offload else ()),
        *(("--tensor-parallel-size", str(scale.gpus), "--compilation-config", PEER_FUSIONS) if scale.gpus > 1 else ()),
    )  # fmt: skip
    start_up_s = scale.start_up_s[1] + (
        OFFLOAD_COMPILE_S + OFFLOAD_PIN_S * host_bytes / GIB if offload else 0.0
    )
    environment = (("VLLM_SERVER_DEV_MODE", "1"),)
    return System(name, command, start_up_s, "http://127.0.0.1:{port}", environment, host_bytes)


def at_once(host_bytes: int) -> tuple[str, ...]:
    """vLLM's default offload: it copies all that is computed at once, and evicts from both tiers by the same order. A
    host tier that is smaller than the device's then has little that the device has not."""
    return ("--kv-offloading-size", f"{host_bytes / GIB:g}", "--kv-offloading-backend", "native")


def lazily(host_bytes: int) -> tuple[str, ...]:
    """vLLM's other connector, which copies out what is about to be evicted."""
    extra = {"cpu_bytes_to_use": host_bytes, "lazy_offload": True}
    config = {
        "kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra,
    }  # fmt: skip
    return ("--kv-transfer-config", json.dumps(config).replace("{", "{{").replace("}", "}}"))


def _workload(
    scale: Scale, family: str, dataset: str, rates: Sequence[float], think_s: float = THINK_S
) -> Workload:
    """``think_s``: the paper's. In the warm-up batches fill, and of long pauses some end."""
    scaled_s = think_s * scale.time_scale
    warm_up_s = max(4 * THINK_S * scale.time_scale, scaled_s / 2)
    return Workload(
        dataset, scaled_s, tuple(rates), RUN_IN_THINKS * scaled_s, warm_up_s, scale.window_s, scale.replay,
        scale.rates[family, dataset].highest,
    )  # fmt: skip


def _systems(scale: Scale) -> Iterable[Experiment]:
    """The paper's Figures 10 and 11 with today's peer, and the same with hybrid models."""
    shorts = {"gqa": "13b", "opt": "opt13b"}
    models = {"gqa": scale.shape(scale.gqa_heads), "opt": scale.opt, **scale.others}
    for (family, dataset), rates in scale.rates.items():
        model = models[family]
        yield Experiment(
            f"systems-{shorts.get(family, family)}-{dataset}",
            f"latency against throughput of all systems, {model}, {dataset} (EuroSys figure 10)",
            tuple(
                Line(system.name, system, model, _workload(scale, family, dataset, offered))
                for system, offered in _offered(scale.of(family), PEER_OPTIONS.get(family, ()), rates)
            ),
        )


def _offered(
    scale: Scale, peer_options: tuple[str, ...], rates: Rates
) -> tuple[tuple[System, tuple[float, ...]], ...]:
    """Each system, and the rates that it meets."""
    ours = partial(pensieve, scale)

    def peer(name: str, *arguments: str, offload: Callable[[int], tuple[str, ...]] | None = None) -> System:
        return vllm(scale, name, *arguments, *peer_options, offload=offload)

    return (
        (ours("Pensieve"), rates.both),
        (ours("Pensieve (GPU cache)", *NO_HOST_TIER), rates.device),
        (ours("Pensieve stateless", *STATELESS), rates.none),
        (peer("vLLM", "--no-enable-prefix-caching"), rates.none),
        (peer("vLLM prefix caching", "--enable-prefix-caching"), rates.device),
        (peer("vLLM CPU offload", "--enable-prefix-caching", offload=at_once), rates.offload or rates.both),
        (peer("vLLM lazy offload", "--enable-prefix-caching", offload=lazily), rates.both),
    )


def _bits(scale: Scale) -> Iterable[Experiment]:
    """Keys, values and weights in 8 bits, beside a peer with the same numbers."""
    eight_bit_keys, eight_bit_weights = ("--kv-dtype", "fp8"), ("--weights", "fp8")
    peer_options = ("--enable-prefix-caching", "--kv-cache-dtype", "fp8", "--quantization", "fp8")
    for dataset, rates in scale.bits.items():
        offered = (
            (pensieve(scale, "Pensieve"), rates.bf16),
            (pensieve(scale, "Pensieve, 8-bit KV", *eight_bit_keys), rates.kv),
            (pensieve(scale, "Pensieve, FP8 weights", *eight_bit_weights), rates.weights),
            (pensieve(scale, "Pensieve, both", *eight_bit_keys, *eight_bit_weights), rates.both),
            (vllm(scale, "vLLM CPU offload, both", *peer_options, offload=at_once), rates.peer),
        )
        model = scale.shape(scale.gqa_heads)
        loads = [replace(_workload(scale, "gqa", dataset, given), most=rates.highest) for _, given in offered]
        yield Experiment(
            f"bits-13b-{dataset}", f"8-bit KV and weights, {model}, {dataset}",
            tuple(Line(system.name, system, model, load) for (system, _), load in zip(offered, loads, strict=True)),
        )  # fmt: skip


def _ablations(scale: Scale) -> Iterable[Experiment]:
    """One idea of Pensieve each, on the ShareGPT-like load, at the two highest rates: below them nothing is dropped.
    The policies alone meet longer pauses, where more is.

    The default is written without options: it is then one and the same job in all of them, and the lines of ``tiers``
    are lines of ``systems-13b-sharegpt``.
    """
    model, rates = scale.shape(scale.gqa_heads), scale.rates["gqa", "sharegpt"]

    def ablation(
        name: str, shows: str, variants: Mapping[str, tuple[str, ...]], think_s: float = THINK_S
    ) -> Experiment:
        load = _workload(scale, "gqa", "sharegpt", _think_rates(scale, think_s), think_s)
        lines = [
            Line(label, pensieve(scale, label, *given), model, load) for label, given in variants.items()
        ]
        return Experiment(f"ablate-{name}", shows, tuple(lines))

    tiers: Mapping[str, tuple[tuple[str, ...], tuple[float, ...]]] = {
        "both tiers": ((), rates.both), "device tier only": (NO_HOST_TIER, rates.device),
        "stateless": (STATELESS, rates.none),
    }  # fmt: skip
    yield Experiment("ablate-tiers", "what each tier of the cache is worth", tuple(
        Line(label, pensieve(scale, label, *arguments), model, _workload(scale, "gqa", "sharegpt", offered))
        for label, (arguments, offered) in tiers.items()
    ))  # fmt: skip
    yield ablation("policy", "what is evicted first (EuroSys figure 14)", {
        name: () if name == DEFAULTS.policy else ("--policy", name) for name in get_args(PolicyName)
    }, PRESSED_THINK_S)  # fmt: skip
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


def _think_rates(scale: Scale, paper_s: float) -> tuple[float, ...]:
    """Rates of the ShareGPT-like load on the GQA model."""
    return THINK_TIMES_S[paper_s] if scale is FULL else (6, 3)


def _think(scale: Scale, model: str) -> Experiment:
    """Without a cache it makes no difference how long users think: one line without one is enough."""
    lines = [
        Line(
            f"think time {paper_s:g} s", pensieve(scale, "Pensieve"), model,
            _workload(scale, "gqa", "sharegpt", _think_rates(scale, paper_s), paper_s),
        )
        for paper_s in THINK_TIMES_S
    ]  # fmt: skip
    none = scale.rates["gqa", "sharegpt"].none
    stateless, load = (
        pensieve(scale, "Pensieve stateless", *STATELESS),
        _workload(scale, "gqa", "sharegpt", none),
    )
    lines.append(Line(f"stateless, think time {THINK_S:g} s", stateless, model, load))
    return Experiment("ablate-think", "how long users think (EuroSys figure 15)", tuple(lines))


def _kv_heads(scale: Scale) -> Experiment:
    kept, none = pensieve(scale, "Pensieve"), pensieve(scale, "stateless", *STATELESS)
    rates = scale.rates["gqa", "sharegpt"]
    counts = KV_HEADS if scale is FULL else {8: (6, 3), 2: (6, 3)}
    lines = []
    for heads, offered in counts.items():
        for suffix, system, turns_per_s in (
            ("", kept, offered),
            (", stateless", none, rates.none),
        ):
            load = _workload(scale, "gqa", "sharegpt", turns_per_s)
            lines.append(Line(f"{heads} KV heads{suffix}", system, scale.shape(heads), load))
    shows = "KV heads that queries share, with the cache and without"
    return Experiment("ablate-kv-heads", shows, tuple(lines))
