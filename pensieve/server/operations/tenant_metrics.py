"""What each tenant uses, as metrics. Off by default: the label says who the tenants are."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from pensieve.core import Usage


class TenantMetrics:
    """Counters with a label ``tenant``. Tenants come from credentials, so there are no more than were given any."""

    def __init__(self, registry: CollectorRegistry) -> None:
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

    def turn_ended(self, tenant: str, outcome: str, usage: Usage) -> None:
        self._turns.labels(tenant, outcome).inc()
        self._tokens.labels(tenant, "computed").inc(usage.new_tokens + usage.recomputed_tokens)
        self._tokens.labels(tenant, "cached").inc(usage.gpu_cached_tokens + usage.swapped_in_tokens)
        self._tokens.labels(tenant, "output").inc(usage.output_tokens)

    def turn_refused(self, tenant: str, reason: str) -> None:
        self._refusals.labels(tenant, reason).inc()
