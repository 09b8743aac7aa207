"""What each tenant uses, as metrics. Off by default: the label says who the tenants are."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pensieve.core import Usage
from pensieve.server.operations.usage import UsageBook


class _UsageCollector(Collector):
    """What tenants hold now. Of the history store it is what ``UsageBook`` saw last: no scrape waits for that."""

    def __init__(self, book: UsageBook) -> None:
        self._book = book

    def collect(self) -> Iterator[Metric]:
        cached = GaugeMetricFamily(
            "pensieve_tenant_cache_tokens",
            "Token slots of the cache whose pages a tenant has, by tier. A chunk in both tiers counts in both.",
            labels=["tenant", "tier"],
        )
        for tenant, (device, host) in self._book.held.items():
            cached.add_metric([tenant, "device"], device)
            cached.add_metric([tenant, "host"], host)
        sessions = GaugeMetricFamily(
            "pensieve_tenant_sessions", "Sessions in the history store, by tenant.", labels=["tenant"]
        )
        stored = GaugeMetricFamily(
            "pensieve_tenant_stored_bytes",
            "Bytes of records in the history store, by tenant.",
            labels=["tenant"],
        )
        for use in self._book.latest:
            if use.stored is not None:
                sessions.add_metric([use.tenant], use.stored.sessions)
                stored.add_metric([use.tenant], use.stored.bytes)
        yield from (cached, sessions, stored)


class TenantMetrics:
    """Counters with a label ``tenant``. Tenants come from credentials, so there are no more than were given any."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._turns = Counter(
            "pensieve_tenant_turns_total",
            "Turns ended, by tenant and outcome as in pensieve_turns_total.",
            ["tenant", "outcome"],
            registry=registry,
        )
        self._refusals = Counter(
            "pensieve_tenant_refusals_total",
            "Turns refused before they began, by tenant and reason; lower case.",
            ["tenant", "reason"],
            registry=registry,
        )
        self._tokens = Counter(
            "pensieve_tenant_tokens_total",
            "Tokens of turns that ended, by tenant: computed of contexts, found cached, generated.",
            ["tenant", "kind"],
            registry=registry,
        )

    def watch(self, book: UsageBook) -> None:
        """Show what is held, too, from now on. Called once."""
        self._registry.register(_UsageCollector(book))

    def turn_ended(self, tenant: str, outcome: str, usage: Usage) -> None:
        self._turns.labels(tenant, outcome).inc()
        self._tokens.labels(tenant, "computed").inc(usage.new_tokens + usage.recomputed_tokens)
        self._tokens.labels(tenant, "cached").inc(usage.gpu_cached_tokens + usage.swapped_in_tokens)
        self._tokens.labels(tenant, "output").inc(usage.output_tokens)

    def turn_refused(self, tenant: str, reason: str) -> None:
        self._refusals.labels(tenant, reason).inc()
