"""The table of ``pensieve serve`` options.

Types and defaults are those of ``pensieve.options.serve.ServeOptions``; a test checks that the two agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, get_args

from pensieve.config import (
    BATCH_LIMITS,
    AllReduce,
    DeviceName,
    DtypeName,
    LoadFormat,
    PolicyName,
    SwapMechanism,
)
from pensieve.options import values


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``name`` is the flag without dashes and the TOML key."""

    name: str
    parse: values.Parser
    help: str
    why: str
    """Reason of the default, for ``--print-config``."""
    metavar: str = ""
    default_text: str = ""
    """The default in ``--help``, where the value itself would not do."""
    can_negate: bool = True
    """A switch has a ``--no-`` twin."""
    unit: str = ""
    """``s``: the value is in seconds, and so is called ``…_s`` in ``ServeOptions``."""
    attribute: str = ""
    """Its name in ``ServeOptions``, where that is longer."""
    keywords: tuple[str, ...] = ()
    """Values that are taken as they are where a file is asked for."""

    @property
    def field(self) -> str:
        """Attribute of ``ServeOptions``."""
        return self.attribute or self.name.replace("-", "_") + (f"_{self.unit}" if self.unit else "")

    @property
    def is_switch(self) -> bool:
        return self.parse is values.boolean

    @property
    def is_file(self) -> bool:
        return self.parse in (values.existing_file, values.file_to_write) or bool(self.keywords)


_NO_FILE = "none needed"
_OFF_TO_MEASURE = "off only to measure its worth"
_PAPER = "the paper's value (EuroSys §4.3)"
(_CPU_TOKENS, _CPU_RUNNING), (_GPU_TOKENS, _GPU_RUNNING) = BATCH_LIMITS["cpu"], BATCH_LIMITS["cuda"]

HTTP_LIMITS: Final = (
    Option(
        "http-max-body",
        values.integer(1, 64),
        "Largest HTTP request, in MiB.",
        "a gRPC message may be no larger",
        "MIB",
    ),
    Option(
        "http-patience",
        values.duration(0, 3600),
        "How long an HTTP call waits for what is away or busy, before it is answered 503 or 429.",
        "a restart is over by then, and clients wait for longer",
        "TIME",
        unit="s",
    ),
    Option(
        "http-cors-origin",
        values.origins,
        "Let pages of these origins call over HTTP; several apart by spaces.",
        "no page of another origin calls unasked",
        "ORIGIN",
    ),
    Option(
        "http-host",
        values.names,
        "More names under which a door on loopback is called without keys; several apart by spaces.",
        "addresses, localhost and this machine's names are known",
        "NAME",
    ),
)
"""What every door has."""

DOOR_OPTIONS: Final = (
    Option(
        "http",
        values.address,
        "Address of the HTTP door, for OpenAI's clients (extra `http`); port 0 picks a free one.",
        "not opened unasked",
        "HOST:PORT",
    ),
    *HTTP_LIMITS,
    Option(
        "http-trusted-proxy",
        values.networks,
        "Proxies whose X-Forwarded-For says who calls over HTTP: addresses or values.networks, apart by spaces.",
        "a header of anybody else says nothing",
        "ADDRESS",
    ),
)
"""Those of the server's own door."""

OPTIONS: tuple[Option, ...] = (
    Option(
        "model",
        values.text,
        "Folder, GGUF file, hub id, `smollm2` (fetched once), or `demo`, which ships with the package.",
        "works offline",
        "MODEL",
    ),
    Option(
        "served-model-name",
        values.display_name,
        "What clients call the model, in calls and answers.",
        "the hub id, or the folder's own name",
        "NAME",
        default_text="the model's own",
    ),
    Option(
        "listen", values.address, "gRPC address; port 0 picks a free one.", "this machine only", "HOST:PORT"
    ),
    Option(
        "admin",
        values.address,
        "HTTP address of metrics and health; port 0 picks a free one.",
        "this machine only; a scraper finds it, no usual exporter is there, and no outgoing connection takes it",
        "HOST:PORT",
    ),
    *DOOR_OPTIONS,
    Option(
        "store",
        values.store_url,
        f"Where history is kept: {values.STORE_FORMS}.",
        "durable without a second program",
        "URL",
        default_text="sqlite in the user's state folder",
    ),
    Option(
        "device",
        values.choice(*get_args(DeviceName)),
        "Where the model runs: auto, cpu or cuda.",
        "CUDA when there is a GPU, else the CPU",
        "NAME",
    ),
    Option(
        "dtype",
        values.choice(*get_args(DtypeName)),
        "Of weights and KV: auto, float32, bfloat16 or float16.",
        "the checkpoint's own on a GPU, float32 on the CPU",
        "NAME",
    ),
    Option(
        "load-format",
        values.choice(*get_args(LoadFormat)),
        "Where weights come from: auto, safetensors, or dummy: random ones, for benchmarks.",
        "the model's own weights",
        "NAME",
    ),
    Option(
        "device-cache",
        values.size(1),
        "KV pool of the device: auto, 40GiB, 512MiB, 4096tokens.",
        "auto: what weights and workspace leave free on a GPU; 1 GiB on a CPU",
        "SIZE",
    ),
    Option(
        "host-cache",
        values.size(0),
        "KV pool in host memory, as above; 0 switches the tier off.",
        "auto: half of the available memory, at most 4x the device tier, beside a GPU; else 1 GiB",
        "SIZE",
    ),
    Option("chunk-tokens", values.power_of_two(256), "Tokens per chunk and KV page.", _PAPER, "N"),
    Option(
        "policy",
        values.choice(*get_args(PolicyName)),
        "What is evicted first: gittins, retention (the paper's), lru, trailing-half or whole-session.",
        "what costs least and comes back least often, as learned while serving, goes first",
        "NAME",
    ),
    Option(
        "swap-watermark",
        values.fraction,
        "Below this share of free device slots, copy out ahead while the host has room; 0: on demand only.",
        _PAPER,
        "SHARE",
    ),
    Option(
        "decode-reserve",
        values.fraction,
        "Share of device slots kept for running generations.",
        _PAPER,
        "SHARE",
    ),
    Option(
        "max-batch-tokens",
        values.integer(0),
        "Tokens computed in one step, at most; 0: auto.",
        f"auto: {_CPU_TOKENS} on a CPU, where steps must stay short; {_GPU_TOKENS} on a GPU",
        "N",
        default_text="auto",
    ),
    Option(
        "max-running",
        values.integer(0),
        "Generations in one batch, at most; 0: auto.",
        f"auto: {_CPU_RUNNING} on a CPU, {_GPU_RUNNING} on a GPU",
        "N",
        default_text="auto",
    ),
    Option(
        "max-queued",
        values.integer(1),
        "Turns that may wait; more are refused.",
        "bounds memory and waiting",
        "N",
    ),
    Option(
        "max-queued-tokens",
        values.integer(0),
        "Input tokens that may wait; more are refused; 0: no limit.",
        "bounds memory",
        "N",
    ),
    Option(
        "max-wait",
        values.duration(0, 3600),
        "A turn that would wait longer in the queue, or has, is refused with the time to come back; 0: none is.",
        "what readers wait for a first word",
        "TIME",
        unit="s",
    ),
    Option(
        "max-connections",
        values.integer(0),
        "Connections to the gRPC port at once; more are closed at once; 0: 256 fewer than the files it may open.",
        "store, engine and admin port need some of those",
        "N",
    ),
    Option(
        "tenant-metrics", values.boolean, "Metrics by tenant, named in a label.", "labels tell who they are"
    ),
    Option(
        "context-limit",
        values.integer(0),
        "Longest context in tokens; 0: the model's own limit.",
        "0 is the model's own limit",
        "N",
        default_text="the model's own",
    ),
    Option(
        "stateless", values.boolean, "Forget a session's KV when its turn ends.", "the cache is the point"
    ),
    Option("unified-batch", values.boolean, "Mix restore, prefill and decode in one step.", _OFF_TO_MEASURE),
    Option(
        "swap-in-first",
        values.boolean,
        "Swap-out ahead of time yields to swap-in.",
        _OFF_TO_MEASURE,
    ),
    Option(
        "sharing",
        values.boolean,
        "Sessions of one tenant share the KV of common beginnings.",
        _OFF_TO_MEASURE,
        attribute="prefix_sharing",
    ),
    Option(
        "pipelined-swap-in",
        values.boolean,
        "Start a step before the last layer is copied in.",
        _OFF_TO_MEASURE,
    ),
    Option(
        "overlapped",
        values.boolean,
        "Schedule the next step while this one runs; GPU only.",
        _OFF_TO_MEASURE,
    ),
    Option(
        "cuda-graphs",
        values.boolean,
        "Replay whole steps as CUDA graphs; GPU only.",
        _OFF_TO_MEASURE,
    ),
    Option(
        "shared-prefix-attention",
        values.boolean,
        "Read the KV that decodes share once for all of them; GPU only.",
        _OFF_TO_MEASURE,
    ),
    Option(
        "swap-mechanism",
        values.choice(*get_args(SwapMechanism)),
        "How chunks cross the bus: auto, batch (copy engine) or kernel; GPU only.",
        "auto: both are measured at start-up, per direction",
        "NAME",
    ),
    Option(
        "verify-swap",
        values.boolean,
        "Check every restored chunk against a checksum; GPU only.",
        "costs time, and what it looks for must not happen",
    ),
    Option(
        "cost-profile",
        values.word_or_file("auto", "estimate"),
        "What recomputing costs: auto, estimate, or a JSON file of `pensieve profile`.",
        "auto: the profile stored for this model and machine; without one a GPU is measured, a CPU estimated",
        "FILE",
        keywords=("auto", "estimate"),
    ),
    Option(
        "tensor-parallel",
        values.integer(1, 64),
        "Divide the model over so many GPUs, or processes on a CPU; caches are totals over them.",
        "one device",
        "N",
    ),
    Option(
        "all-reduce",
        values.choice(*get_args(AllReduce)),
        "Sums over GPUs: auto, or nccl, which leaves symmetric memory out; only with --tensor-parallel.",
        "auto: by the size of the sum",
        "NAME",
    ),
    Option(
        "threads",
        values.integer(0, 1024),
        "CPU threads of the model; 0: one per core.",
        "0 is one per core",
        "N",
        default_text="one per core",
    ),
    Option(
        "chat-template", values.existing_file, "Jinja file in place of the model's own.", _NO_FILE, "FILE"
    ),
    Option(
        "allow-rewriting-template",
        values.boolean,
        "Take a chat template that rewrites more of earlier turns than thoughts and dates, which need no flag; "
        "the history keeps what was generated.",
        "a rewritten history could not be cached",
        can_negate=False,
    ),
    Option(
        "api-keys",
        values.existing_file,
        "TOML file of API keys, client certificates and limits per tenant; without: no login.",
        "loopback only",
        "FILE",
    ),
    Option("tls-cert", values.existing_file, "PEM certificate chain.", "loopback only", "FILE"),
    Option("tls-key", values.existing_file, "PEM private key.", "loopback only", "FILE"),
    Option(
        "tls-client-ca",
        values.existing_file,
        "PEM certificates of who signs clients; every client must then show one.",
        "API keys say who calls",
        "FILE",
    ),
    Option(
        "insecure-i-know",
        values.boolean,
        "Allow addresses off loopback without TLS and keys.",
        "exposing a server takes a decision",
        can_negate=False,
    ),
    Option(
        "disconnect-grace",
        values.duration(0, 3600),
        "How long a turn outlives its caller's connection, waiting for a re-attach.",
        "covers a reconnecting client",
        "TIME",
        unit="s",
    ),
    Option(
        "drain-grace",
        values.duration(0, 3600),
        "How long running turns may finish after SIGTERM.",
        "most answers end within it",
        "TIME",
        unit="s",
    ),
    Option(
        "heartbeat",
        values.duration(0.1, 3600),
        "Longest silence on a stream.",
        "proxies close streams that stay silent for a minute",
        "TIME",
        unit="s",
    ),
    Option(
        "lease",
        values.duration(1, 3600),
        "How long a session stays locked by a server that died.",
        "longer than a pause of the store, shorter than a user's patience",
        "TIME",
        unit="s",
    ),
    Option(
        "stall-limit",
        values.duration(1, 3600),
        "An engine whose step takes this long is replaced, if nothing is known yet of steps of its size.",
        "longer than a first step, compilation included; others are judged by what steps took lately",
        "TIME",
        unit="s",
    ),
    Option(
        "record",
        values.file_to_write,
        "Append a trace of lengths and times, never text, for replay and simulate; gzip when it ends in .gz.",
        "nothing is recorded unasked",
        "FILE",
    ),
    Option(
        "traces", values.http_url, "OTLP address for traces (extra `otel`).", "nothing is sent unasked", "URL"
    ),
    Option(
        "log-level",
        values.choice("debug", "info", "warning", "error"),
        "debug, info, warning or error.",
        "one line per event that matters",
        "LEVEL",
    ),
    Option(
        "page-text", values.boolean, "The admin port's page shows what was said.", "text stays in the store"
    ),
    Option("log-json", values.boolean, "One JSON object per log line.", "read by people"),
)

GROUPS: Final[Mapping[str, Sequence[str]]] = {
    "Model": (
        "model",
        "served-model-name",
        "device",
        "dtype",
        "context-limit",
        "tensor-parallel",
        "threads",
        "chat-template",
        "allow-rewriting-template",
        "load-format",
    ),
    "Addresses": (
        "listen",
        "admin",
        "http",
        "http-max-body",
        "http-patience",
        "http-cors-origin",
        "http-host",
        "http-trusted-proxy",
    ),
    "Callers and TLS": (
        "api-keys",
        "tls-cert",
        "tls-key",
        "tls-client-ca",
        "insecure-i-know",
    ),
    "History": (
        "store",
        "lease",
    ),
    "Memory": (
        "device-cache",
        "host-cache",
        "policy",
        "cost-profile",
        "chunk-tokens",
        "swap-watermark",
        "decode-reserve",
    ),
    "Load": (
        "max-running",
        "max-batch-tokens",
        "max-wait",
        "max-queued",
        "max-queued-tokens",
        "max-connections",
    ),
    "Operation": (
        "config",
        "print-config",
        "log-level",
        "log-json",
        "record",
        "tenant-metrics",
        "traces",
        "page-text",
        "drain-grace",
        "disconnect-grace",
        "heartbeat",
        "stall-limit",
        "help",
    ),
    "Steps and copies, to measure with": (
        "off",
        "all-reduce",
        "swap-mechanism",
        "verify-swap",
    ),
}
"""Heading → names of options, in the order of the help."""

BASIC_OPTIONS: Final = frozenset(
    (
        "model", "device", "dtype", "context-limit", "tensor-parallel", "listen", "admin", "http", "api-keys",
        "tls-cert", "tls-key", "insecure-i-know", "store", "device-cache", "host-cache", "policy", "max-running",
        "max-wait", "config", "print-config", "log-level", "help",
    )
)  # fmt: skip
"""Options on the first screen of the help: what most people set."""

OFF_SWITCHES: Final[Mapping[str, tuple[str, bool]]] = {
    "state": ("stateless", True),
    "sharing": ("sharing", False),
    "unified-batch": ("unified-batch", False),
    "swap-in-first": ("swap-in-first", False),
    "pipelined-swap-in": ("pipelined-swap-in", False),
    "overlapped": ("overlapped", False),
    "cuda-graphs": ("cuda-graphs", False),
    "shared-prefix-attention": ("shared-prefix-attention", False),
}
"""Idea that ``--off`` switches off → the option that does it, and its value then. These options are not in the help."""
HIDDEN_OPTIONS: Final = frozenset(name for name, _ in OFF_SWITCHES.values())
