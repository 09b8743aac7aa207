"""The table of ``pensieve serve`` options: name, parser, help, and why the default is what it is.

Types and defaults are those of ``pensieve.options.ServeOptions``; a test checks that the two agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from pensieve import option_values as values


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``name`` is the flag without dashes and the TOML key."""

    name: str
    parse: values.Parser
    help: str
    why: str
    """Reason of the default, for ``--print-config``."""
    metavar: str = ""
    shown: str = ""
    """The default in ``--help``, where the value itself would not do."""
    can_negate: bool = True
    """A switch has a ``--no-`` twin."""
    unit: str = ""
    """``s``: the value is in seconds, and so is called ``…_s`` in ``ServeOptions``."""

    @property
    def field(self) -> str:
        """Attribute of ``ServeOptions``."""
        return self.name.replace("-", "_") + (f"_{self.unit}" if self.unit else "")

    @property
    def is_switch(self) -> bool:
        return self.parse is values.boolean

    @property
    def is_file(self) -> bool:
        return self.parse is values.existing_file


_NO_FILE = "none needed"
_SMALL = "fits a laptop beside other programs; on a GPU give it what the weights leave free"
_PAPER = "the paper's value (EuroSys §4.3)"

OPTIONS: tuple[Option, ...] = (
    Option(
        "model",
        values.text,
        "Folder, hub id, or `demo`, which ships with the package.",
        "works offline",
        "MODEL",
    ),
    Option(
        "listen", values.address, "gRPC address; port 0 picks a free one.", "this machine only", "HOST:PORT"
    ),
    Option(
        "admin",
        values.address,
        "HTTP address of metrics and health; port 0 picks a free one.",
        "this machine only, and no clash between servers",
        "HOST:PORT",
    ),
    Option(
        "store",
        values.store_url,
        f"Where history is kept: {values.STORE_FORMS}.",
        "durable without a second program",
        "URL",
        shown="sqlite in the user's state folder",
    ),
    Option(
        "device",
        values.choice("auto", "cpu", "cuda"),
        "Where the model runs: auto, cpu or cuda.",
        "CUDA when there is a GPU, else the CPU",
        "NAME",
    ),
    Option(
        "dtype",
        values.choice("auto", "float32", "bfloat16", "float16"),
        "Of weights and KV: auto, float32, bfloat16 or float16.",
        "the checkpoint's own on a GPU, float32 on the CPU",
        "NAME",
    ),
    Option(
        "device-cache", values.size(1), "KV pool of the device: 40GiB, 512MiB, 4096tokens.", _SMALL, "SIZE"
    ),
    Option(
        "host-cache",
        values.size(0),
        "KV pool in host memory; 0 switches the tier off.",
        _SMALL,
        "SIZE",
    ),
    Option("chunk-tokens", values.power_of_two(256), "Tokens per chunk and KV page.", _PAPER, "N"),
    Option(
        "policy",
        values.choice("retention", "lru", "trailing-half", "whole-session"),
        "What is evicted first: retention, lru, trailing-half or whole-session.",
        "cheapest to recompute per idle second goes first",
        "NAME",
    ),
    Option(
        "swap-watermark",
        values.fraction,
        "Copy out ahead of time below this share of free device slots; 0: on demand only.",
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
        values.integer(1),
        "Tokens computed in one step, at most.",
        "short steps on a CPU; a GPU likes 2048 and more",
        "N",
    ),
    Option("max-running", values.integer(1), "Generations in one batch, at most.", "bounds the batch", "N"),
    Option(
        "max-queued",
        values.integer(1),
        "Turns that may wait; more are refused.",
        "bounds memory and waiting",
        "N",
    ),
    Option(
        "context-limit",
        values.integer(0),
        "Longest context in tokens; 0: the model's own limit.",
        "0 is the model's own limit",
        "N",
        shown="the model's own",
    ),
    Option(
        "stateless", values.boolean, "Forget a session's KV when its turn ends.", "the cache is the point"
    ),
    Option(
        "unified-batch",
        values.boolean,
        "Mix restore, prefill and decode in one step.",
        "off only to measure its worth",
    ),
    Option(
        "swap-in-first",
        values.boolean,
        "Swap-out ahead of time yields to swap-in.",
        "off only to measure its worth",
    ),
    Option(
        "pipelined-swap-in",
        values.boolean,
        "Start a step before the last layer is copied in.",
        "off only to measure its worth",
    ),
    Option(
        "cost-profile",
        values.existing_file,
        "JSON of `pensieve profile`.",
        "unset: cost estimated from the model's shape",
        "FILE",
    ),
    Option("tensor-parallel", values.only_one, "GPUs per model; only 1 for now.", "one device", "N"),
    Option(
        "threads",
        values.integer(0),
        "CPU threads of the model; 0: one per core.",
        "0 is one per core",
        "N",
        shown="one per core",
    ),
    Option(
        "chat-template", values.existing_file, "Jinja file in place of the model's own.", _NO_FILE, "FILE"
    ),
    Option(
        "allow-rewriting-template",
        values.boolean,
        "Take a chat template that changes earlier turns; the history keeps what was generated.",
        "a rewritten history could not be cached",
        can_negate=False,
    ),
    Option(
        "api-keys", values.existing_file, "TOML file of API keys; without: no login.", "loopback only", "FILE"
    ),
    Option("tls-cert", values.existing_file, "PEM certificate chain.", "loopback only", "FILE"),
    Option("tls-key", values.existing_file, "PEM private key.", "loopback only", "FILE"),
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
        "An engine that has work and makes no step for this long is replaced.",
        "longer than the longest step, first-use compilation included",
        "TIME",
        unit="s",
    ),
    Option(
        "log-level",
        values.choice("debug", "info", "warning", "error"),
        "debug, info, warning or error.",
        "one line per event that matters",
        "LEVEL",
    ),
    Option("log-json", values.boolean, "One JSON object per log line.", "read by people"),
)
