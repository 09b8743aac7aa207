"""Settings of the conversation service, fixed at start: identity, limits, defaults and times."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from pensieve.config import (
    DISCONNECT_GRACE_S,
    HEARTBEAT_S,
    LEASE_S,
    MAX_QUEUED_TOKENS,
    MAX_WAIT_S,
    EngineTuning,
    SchedulerConfig,
)
from pensieve.core import MAX_CANDIDATES, SamplingDefaults
from pensieve.store import Key
from pensieve.store.records import PrefixSharing, SessionConfig


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits on one request, checked before anything is tokenised or looked up."""

    max_request_bytes: int = 4 * 1024 * 1024
    max_input_chars: int = 1_000_000
    """Characters of all texts of one request together, counted before tokenising."""
    max_input_items: int = 64
    max_initial_items: int = 1024
    max_stop_sequences: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 128
    max_logit_bias: int = 1024
    max_top_logprobs: int = 20
    max_candidates: int = MAX_CANDIDATES
    max_beam_width: int = MAX_CANDIDATES
    max_annotations: int = 16
    max_annotation_bytes: int = 1024 * 1024
    """Keys and values of one turn together, as UTF-8."""
    max_mark_chars: int = 256
    max_labels: int = 64
    max_label_chars: int = 256
    max_ttl_s: float = 366 * 24 * 3600.0
    min_ttl_s: float = 1.0
    max_turn_s: float = 24 * 3600.0
    max_page: int = 1000
    default_page: int = 50


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """Settings of a front end that its turns and sessions depend on. They do not change while it runs."""

    replica: str
    """Names this front end in leases and answers."""
    model: str = ""
    """Name shown to clients; a session may name it or none."""
    model_sha256: str = ""
    """Hash of the model's content (``model.folder``); sessions are bound to it. "": unknown, not compared."""
    limits: RequestLimits = RequestLimits()
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    """Sampling values where neither turn nor session sets one. Those unset here too are ``core.Sampling``'s."""
    lease_s: float = LEASE_S
    """How long a dead replica's turn blocks its session. Renewed every third of it."""
    heartbeat_s: float = HEARTBEAT_S
    """A stream is never silent for longer."""
    messages_per_s: float = 4000.0
    """With many streams, output is merged to stay below this rate (``StreamPacer``): about half of one core."""
    max_wait_s: float = MAX_WAIT_S
    """A turn that would wait longer in the queue is refused; 0: no limit."""
    max_queued: int = SchedulerConfig.max_queued
    max_queued_tokens: int = MAX_QUEUED_TOKENS
    """Input tokens that may wait; 0: no limit."""
    disconnect_grace_s: float = DISCONNECT_GRACE_S
    """How long a turn without a listener waits for a re-attach."""
    commit_retry_s: float = 30.0
    """How long a finished turn retries its commit while the store is down."""
    discarded_turns: int = 4096
    history_cache_bytes: int = 256 * 1024 * 1024
    page_secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    """Authenticates page tokens; replicas must share it."""
    page_token_s: float = 24 * 3600.0
    prefix_sharing: bool = field(default_factory=lambda: EngineTuning().prefix_sharing)

    def sharing_scope(self, key: Key, config: SessionConfig) -> str:
        """Return the engine's scope for prefix sharing: the tenant's, or "" if the session shares with none."""
        shares = self.prefix_sharing and config.prefix_sharing is PrefixSharing.TENANT
        return f"tenants/{key.tenant}" if shares else ""
