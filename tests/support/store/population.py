"""Sessions of every kind, made through the public face of a store: for what copies and repairs them as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from pensieve.core import Role, SamplingDefaults, pack_tokens
from pensieve.store import Counts, EndOrder, HistoryStore, Key
from pensieve.store.records import (
    History,
    Item,
    Record,
    RecordKind,
    SessionConfig,
    SessionRow,
)
from support.store.store_bench import request, turn_record


@dataclass(frozen=True)
class Made:
    """One session to make, with what is to happen to it."""

    key: Key
    steps: tuple[str, ...] = ()
    """``turn``, ``rewind`` or ``update``, each a committed change."""
    end: str = "idle"
    """``idle``, ``pending`` (a turn was begun), ``ordered`` (and told how to end), ``called off``, ``damaged`` or
    ``deleted``."""
    ttl_s: float = 0.0
    labels: dict[str, str] = field(default_factory=dict)
    text: str = "hello"

    def request_ids(self) -> dict[str, int]:
        """The ones that were committed → revision; an update without one is left out."""
        return {f"q{at}": at + 2 for at, step in enumerate(self.steps) if step != "update"}


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1, max_size=8)

SESSIONS = st.lists(
    st.builds(
        Made,
        key=st.builds(Key, st.sampled_from(["acme", "b/{ü}%", "c"]), NAMES),
        steps=st.lists(st.sampled_from(["turn", "turn", "rewind", "update"]), max_size=5).map(tuple),
        end=st.sampled_from(["idle", "idle", "pending", "ordered", "called off", "damaged", "deleted"]),
        ttl_s=st.sampled_from([0.0, 3600.5]),
        labels=st.dictionaries(st.sampled_from(["a", "b"]), NAMES, max_size=2),
        text=st.text(st.characters(codec="utf-8"), max_size=20),
    ),
    max_size=5,
    unique_by=lambda made: made.key,
)
"""Populations of a store."""


async def populate(store: HistoryStore, sessions: list[Made]) -> None:
    """Make them in an open store, with item numbers that add up."""
    for made in sessions:
        await _make(store, made)


def changed(made: Made, history: History, at: int) -> Record:
    """The record of step ``at``."""
    base, step = history.revision, made.steps[at]
    if step == "turn":
        plain = turn_record(base, f"q{at}", made.text)
        first = history.head_item + 1
        items = tuple(
            Item(first + i, one.role, one.text, one.tokens, one.request_id)
            for i, one in enumerate(plain.items)
        )
        return Record(
            revision=base + 1,
            kind=RecordKind.TURN,
            time_ms=at,
            request_id=f"q{at}",
            items=items,
            turn=plain.turn,
        )
    if step == "rewind":
        return Record(
            revision=base + 1, kind=RecordKind.REWIND, time_ms=at, request_id=f"q{at}", keep_items=1
        )
    config = SessionConfig(
        model="tiny", ttl_s=made.ttl_s, sampling=SamplingDefaults(seed=2**64 - 1, logit_bias={5: 0.1 + at})
    )
    return Record(
        revision=base + 1, kind=RecordKind.UPDATE, time_ms=at, config=config, labels={"updated": str(at)}
    )


def counts_of(history: History) -> Counts:
    return Counts(history.head_item, len(history.items), int(history.tokens().size))


async def _make(store: HistoryStore, made: Made) -> None:
    key = made.key
    config = SessionConfig(model="tiny", system_prompt="Be brief.", ttl_s=made.ttl_s)
    prompt = Item(1, Role.SYSTEM, "Be brief.", pack_tokens([9, 8]))
    first = Record(
        revision=1, kind=RecordKind.CREATE, time_ms=1, items=(prompt,), config=config, labels=made.labels
    )
    history = History().apply(first, "")
    numbers = counts_of(history)
    row = SessionRow(
        tenant=key.tenant,
        session_id=key.session_id,
        head_item=numbers.head_item,
        item_count=numbers.item_count,
        context_tokens=numbers.context_tokens,
        config=config,
        labels=made.labels,
        forked_from="someone",
        forked_from_item=7,
    )
    await store.create(row, first, f"made {made.text}")
    for at, step in enumerate(made.steps):
        record = changed(made, history, at)
        history = history.apply(record, "")
        numbers = counts_of(history)
        if step == "turn":
            await store.begin(key, request(f"q{at}", f"t{at}"))
            await store.commit(key, f"t{at}", f"fp-q{at}", record, numbers)
        else:
            await store.apply(key, f"fp-q{at}", record, numbers)
    if made.end in ("pending", "ordered", "called off"):
        lease_ms = 1 if made.end == "pending" else 60_000
        await store.begin(key, request("waiting", "t", seed=41, lease_ms=lease_ms))
    if made.end == "ordered":
        await store.begin(key, request("waiting", "other", follows=True))
        await store.ask_to_end(key, "waiting", EndOrder(keep=True))
        await store.renew(key, "t", 1)
    elif made.end == "called off":
        await store.abort(key, "t", called_off=True)
    elif made.end == "damaged":
        await store.mark_damaged(key)
    elif made.end == "deleted":
        await store.delete(key)
