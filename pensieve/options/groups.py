"""The headings of ``pensieve serve --help``, and what stands below each: first what most people set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

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
    "History": ("store", "lease"),
    "Memory": (
        "device-cache",
        "host-cache",
        "policy",
        "sharing",
        "cost-profile",
        "chunk-tokens",
        "swap-watermark",
        "decode-reserve",
        "stateless",
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
        "unified-batch",
        "swap-in-first",
        "pipelined-swap-in",
        "overlapped",
        "cuda-graphs",
        "shared-prefix-attention",
        "all-reduce",
        "swap-mechanism",
        "verify-swap",
    ),
}
"""Heading → names of options, in the order of the help."""


class GroupedCommand(click.Command):
    """A command whose help has its options below headings. One without a heading comes last, under "Other"."""

    def __init__(self, *args: Any, groups: Mapping[str, Sequence[str]], **others: Any) -> None:
        super().__init__(*args, **others)
        self._groups = groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                rows[max(param.opts, key=len).lstrip("-")] = record
        for title, names in self._groups.items():
            with formatter.section(title):
                formatter.write_dl([rows.pop(name) for name in names if name in rows])
        if rows:
            with formatter.section("Other"):
                formatter.write_dl(list(rows.values()))
