"""The table of ``pensieve serve`` options. Types and defaults are in ``pensieve.options.serve.ServeOptions``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, get_args

from pensieve.config import (
    BATCH_LIMITS,
    AllReduce,
    DeviceName,
    DtypeName,
    KvDtypeName,
    LoadFormat,
    PolicyName,
    SwapMechanism,
    WeightsName,
)
from pensieve.options import values


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``name`` is the flag without dashes, and the TOML key."""

    name: str
    parse: values.Parser
    help: str
    why: str
    """Reason for the default, shown by ``--print-config``."""
    metavar: str = ""
    default_text: str = ""
    """The default as ``--help`` shows it, if not the value itself."""
    can_negate: bool = True
    unit: str = ""
    """``s``: the value is in seconds, and the field's name ends in ``_s``."""
    attribute: str = ""
    """Name of the field in ``ServeOptions``, if it differs."""
    keywords: tuple[str, ...] = ()
    """Values accepted in place of a file."""

    @property
    def field(self) -> str:
        return self.attribute or self.name.replace("-", "_") + (f"_{self.unit}" if self.unit else "")

    @property
    def is_switch(self) -> bool:
        return self.parse is values.boolean

    @property
    def is_file(self) -> bool:
        return self.parse in (values.existing_file, values.file_to_write) or bool(self.keywords)


_NO_FILE = "none needed"
_OFF_TO_MEASURE = "off only to measure its effect"
_PAPER = "the paper's value (EuroSys §4.3)"
(_CPU_TOKENS, _CPU_RUNNING), (_GPU_TOKENS, _GPU_RUNNING) = BATCH_LIMITS["cpu"], BATCH_LIMITS["cuda"]

HTTP_LIMITS: Final = (
    Option(
        "http-max-body",
        values.integer(1, 64),
        "Largest HTTP request, in MiB.",
        "the limit of a gRPC message",
        "MIB",
    ),
    Option(
        "http-patience",
        values.duration(0, 3600),
        "How long an HTTP call waits for a server that is unavailable or overloaded before it fails with 503 or 429.",
        "long enough for a restart, shorter than clients' own timeouts",
        "TIME",
        unit="s",
    ),
    Option(
        "http-cors-origin",
        values.origins,
        "Web origins that may call the HTTP API (CORS), separated by spaces; * allows all.",
        "no other web page may call by default",
        "ORIGIN",
    ),
    Option(
        "http-host",
        values.names,
        "Additional host names accepted on loopback without API keys, separated by spaces.",
        "addresses, localhost and this machine's names are accepted already",
        "NAME",
    ),
)
"""The HTTP options that `pensieve serve` and `pensieve gateway` share."""

DOOR_OPTIONS: Final = (
    Option(
        "http",
        values.address,
        "Address of the OpenAI-compatible HTTP API (extra `http`); port 0 picks a free one.",
        "off by default",
        "HOST:PORT",
    ),
    *HTTP_LIMITS,
    Option(
        "http-trusted-proxy",
        values.networks,
        "Proxies whose X-Forwarded-For header is trusted: addresses or networks, separated by spaces.",
        "any caller can forge the header",
        "ADDRESS",
    ),
)

OPTIONS: tuple[Option, ...] = (
    Option(
        "model",
        values.text,
        "Model folder, GGUF file, hub id, `smollm2` (downloaded once), or `demo`, which is part of the package.",
        "works offline",
        "MODEL",
    ),
    Option(
        "served-model-name",
        values.display_name,
        "Name of the model in requests and responses.",
        "the hub id, or the folder's name",
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
        "this machine only; a fixed port for scrapers, used by no common exporter and no outgoing connection",
        "HOST:PORT",
    ),
    *DOOR_OPTIONS,
    Option(
        "store",
        values.store_url,
        f"URL of the history store: {values.STORE_FORMS}. An absolute PATH makes four slashes.",
        "durable without another program",
        "URL",
        default_text="sqlite in the user's state folder",
    ),
    Option(
        "device",
        values.choice(*get_args(DeviceName)),
        "Where the model runs: auto, cpu or cuda.",
        "CUDA if there is a GPU, otherwise the CPU",
        "NAME",
    ),
    Option(
        "dtype",
        values.choice(*get_args(DtypeName)),
        "Data type of weights and KV: auto, float32, bfloat16 or float16.",
        "the checkpoint's own on a GPU, float32 on the CPU",
        "NAME",
    ),
    Option(
        "weights",
        values.choice(*get_args(WeightsName)),
        "Form of the weights in memory and in products: auto, full (as --dtype says) or fp8 (8 bits, half the memory).",
        "8 bits if the folder is made for them, otherwise as --dtype says",
        "NAME",
    ),
    Option(
        "kv-dtype",
        values.choice(*get_args(KvDtypeName)),
        "Store keys and values in 8 bits: fp8 or int8, about half the memory of 16 bits. Answers change a little; "
        "`pensieve profile --kv-error` shows how much.",
        "auto: the data type of the model",
        "NAME",
    ),
    Option(
        "load-format",
        values.choice(*get_args(LoadFormat)),
        "Source of the weights: auto, safetensors, or dummy (random weights, for benchmarks).",
        "the model's own weights",
        "NAME",
    ),
    Option(
        "device-cache",
        values.size_or_range(1),
        "Size of the KV cache on the device: auto, 40GiB, 512MiB, 4096tokens (room for one context of that length), or "
        "FLOOR..CEILING, such as 8GiB..60GiB: it then grows and shrinks while serving.",
        "auto: the memory left by weights and workspace on a GPU; 1 GiB on a CPU",
        "SIZE",
    ),
    Option(
        "device-slack",
        values.byte_size,
        "Memory of the GPU to leave free for other programs: the device cache shrinks towards its floor while less is "
        "free; 0: do not look. Requires a range.",
        "0: the operator decides, with `pensieve memory`",
        "SIZE",
    ),
    Option(
        "idle-release",
        values.duration(0, 7 * 86_400),
        "Shrink the device cache to its floor after this time without a turn; 0: never. Requires a range.",
        "0: memory is kept until it is asked for",
        "TIME",
        unit="s",
    ),
    Option(
        "host-cache",
        values.size(0),
        "Size of the KV cache in host memory, as above; 0 disables it.",
        "auto: with a GPU half of the available memory, at most 4x the device cache; otherwise 1 GiB",
        "SIZE",
    ),
    Option("chunk-tokens", values.power_of_two(256), "Tokens per chunk and KV page.", _PAPER, "N"),
    Option(
        "policy",
        values.choice(*get_args(PolicyName)),
        "Eviction policy: gittins, retention (the paper's), lru, trailing-half or whole-session.",
        "evicts chunks that are cheap to recompute and seldom needed again, as learned while serving",
        "NAME",
    ),
    Option(
        "swap-watermark",
        values.fraction,
        "Copy chunks to the host ahead of time while the share of free device slots is below this; 0: on demand only.",
        _PAPER,
        "SHARE",
    ),
    Option(
        "decode-reserve",
        values.fraction,
        "Share of device slots reserved for running generations.",
        _PAPER,
        "SHARE",
    ),
    Option(
        "max-batch-tokens",
        values.integer(0),
        "Most tokens computed in one step; 0: auto.",
        f"auto: {_CPU_TOKENS} on a CPU, to keep steps short; {_GPU_TOKENS} on a GPU",
        "N",
        default_text="auto",
    ),
    Option(
        "max-running",
        values.integer(0),
        "Most generations in one batch; 0: auto.",
        f"auto: {_CPU_RUNNING} on a CPU, {_GPU_RUNNING} on a GPU",
        "N",
        default_text="auto",
    ),
    Option(
        "max-queued",
        values.integer(1),
        "Most turns in the queue; further ones are refused.",
        "bounds memory and waiting",
        "N",
    ),
    Option(
        "max-queued-tokens",
        values.integer(0),
        "Most input tokens in the queue; further turns are refused; 0: no limit.",
        "bounds memory",
        "N",
    ),
    Option(
        "max-wait",
        values.duration(0, 3600),
        "Longest wait in the queue: turns that would or did wait longer are refused with a retry delay; 0: no limit.",
        "users wait about this long for a first word",
        "TIME",
        unit="s",
    ),
    Option(
        "max-connections",
        values.integer(0),
        "Most connections to the gRPC port; further ones are closed; 0: the limit of open files minus 256.",
        "the store, the engine and the admin port need files, too",
        "N",
    ),
    Option(
        "tenant-metrics", values.boolean, "Label metrics with the tenant.", "labels reveal the tenants' names"
    ),
    Option(
        "context-limit",
        values.integer(0),
        "Longest context in tokens; 0: the model's own limit.",
        "0: the model's own limit",
        "N",
        default_text="the model's own",
    ),
    Option(
        "stateless",
        values.boolean,
        "Drop a session's KV when its turn ends.",
        "reusing KV is the purpose of the server",
    ),
    Option(
        "invariant",
        values.boolean,
        "Compute each token by the same operations in the same order, whatever else is in the batch or the cache: "
        "answers are then equal to the last bit. Refused where it cannot be kept.",
        "ordinary operations are faster",
    ),
    Option(
        "speculation",
        values.boolean,
        "Guess tokens from the conversation itself and compute several in one step. Answers stay the same.",
        "auto: on a CPU in float32 or with --invariant; elsewhere larger steps could round a token differently",
        default_text="auto",
    ),
    Option("unified-batch", values.boolean, "Mix restore, prefill and decode in one step.", _OFF_TO_MEASURE),
    Option(
        "swap-in-first",
        values.boolean,
        "Let swap-in go before swap-out ahead of time.",
        _OFF_TO_MEASURE,
    ),
    Option(
        "sharing",
        values.boolean,
        "Share the KV of common prefixes between the sessions of a tenant.",
        _OFF_TO_MEASURE,
        attribute="prefix_sharing",
    ),
    Option(
        "pipelined-swap-in",
        values.boolean,
        "Start a step before all layers are copied in.",
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
        "Read KV that several decodes share only once; GPU only.",
        _OFF_TO_MEASURE,
    ),
    Option(
        "swap-mechanism",
        values.choice(*get_args(SwapMechanism)),
        "How chunks are copied between host and device: auto, batch (copy engine) or kernel; GPU only.",
        "auto: both are measured at startup, per direction",
        "NAME",
    ),
    Option(
        "verify-swap",
        values.boolean,
        "Check restored chunks against checksums: on a GPU those from the host, with --invariant recomputed ones.",
        "costs time; an error that it could find would be a bug",
    ),
    Option(
        "cost-profile",
        values.word_or_file("auto", "estimate"),
        "Costs of recomputing: auto, estimate, or a JSON file from `pensieve profile`.",
        "auto: the profile stored for this model and machine; otherwise a GPU is measured, a CPU estimated",
        "FILE",
        keywords=("auto", "estimate"),
    ),
    Option(
        "tensor-parallel",
        values.integer(1, 64),
        "Divide the model over N GPUs, or N processes on a CPU; cache sizes are totals.",
        "one device",
        "N",
    ),
    Option(
        "all-reduce",
        values.choice(*get_args(AllReduce)),
        "All-reduce over GPUs: auto, or nccl (no symmetric memory); only with --tensor-parallel.",
        "auto: by the size of the sum",
        "NAME",
    ),
    Option(
        "threads",
        values.integer(0, 1024),
        "CPU threads of the model; 0: one per core.",
        "0: one per core",
        "N",
        default_text="one per core",
    ),
    Option(
        "chat-template",
        values.existing_file,
        "Jinja file that replaces the model's own template.",
        _NO_FILE,
        "FILE",
    ),
    Option(
        "allow-rewriting-template",
        values.boolean,
        "Accept a chat template that rewrites more of earlier turns than thoughts and dates. The history keeps the "
        "generated text.",
        "rewritten history cannot be cached",
        can_negate=False,
    ),
    Option(
        "api-keys",
        values.existing_file,
        "TOML file of API keys, client certificates and limits per tenant; default: no authentication.",
        "loopback only",
        "FILE",
    ),
    Option("tls-cert", values.existing_file, "PEM certificate chain.", "loopback only", "FILE"),
    Option("tls-key", values.existing_file, "PEM private key.", "loopback only", "FILE"),
    Option(
        "tls-client-ca",
        values.existing_file,
        "PEM certificates of the authority that signs client certificates; every client must then present one.",
        "API keys identify callers",
        "FILE",
    ),
    Option(
        "insecure-i-know",
        values.boolean,
        "Allow network addresses without TLS and API keys, behind your own protection.",
        "exposing a server must be a decision",
        can_negate=False,
    ),
    Option(
        "disconnect-grace",
        values.duration(0, 3600),
        "How long a turn runs on after its caller disconnected, waiting for a reconnect.",
        "enough for a client to reconnect",
        "TIME",
        unit="s",
    ),
    Option(
        "drain-grace",
        values.duration(0, 3600),
        "Time for running turns to finish after SIGTERM.",
        "most answers take less",
        "TIME",
        unit="s",
    ),
    Option(
        "heartbeat",
        values.duration(0.1, 3600),
        "Longest silence on a stream before a keep-alive message.",
        "proxies close streams after a minute of silence",
        "TIME",
        unit="s",
    ),
    Option(
        "lease",
        values.duration(1, 3600),
        "How long a session stays locked if its server dies.",
        "longer than a pause of the store, shorter than a user waits",
        "TIME",
        unit="s",
    ),
    Option(
        "stall-limit",
        values.duration(1, 3600),
        "Restart an engine whose step takes this long, until there are measurements of steps of its size.",
        "longer than a first step with compilation; later steps are compared with recent ones",
        "TIME",
        unit="s",
    ),
    Option(
        "record",
        values.file_to_write,
        "Append lengths and times of turns, never text, to a trace for replay and simulate; .gz compresses it.",
        "off by default",
        "FILE",
    ),
    Option("traces", values.http_url, "OTLP URL to send traces to (extra `otel`).", "off by default", "URL"),
    Option(
        "log-level",
        values.choice("debug", "info", "warning", "error"),
        "debug, info, warning or error.",
        "one line per important event",
        "LEVEL",
    ),
    Option(
        "page-text",
        values.boolean,
        "Show conversation texts on the admin port's page.",
        "texts stay in the store",
    ),
    Option("log-json", values.boolean, "Log one JSON object per line.", "people read the log"),
)

GROUPS: Final[Mapping[str, Sequence[str]]] = {
    "Model": (
        "model",
        "served-model-name",
        "device",
        "dtype",
        "weights",
        "kv-dtype",
        "context-limit",
        "tensor-parallel",
        "threads",
        "chat-template",
        "allow-rewriting-template",
        "load-format",
        "invariant",
        "speculation",
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
    "Authentication and TLS": (
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
        "device-slack",
        "idle-release",
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
    "Measurement": (
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
"""Options on the first screen of the help: those that most users set."""

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
"""Name for ``--off`` → the option that it sets, and the value. The help does not show these options."""
HIDDEN_OPTIONS: Final = frozenset(name for name, _ in OFF_SWITCHES.values())
