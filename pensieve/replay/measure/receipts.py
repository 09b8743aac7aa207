"""Checks the receipts of a replay: of every turn by itself, and of one turn against the turn before."""

from __future__ import annotations

from collections.abc import Iterable

from pensieve.replay.records import TurnRecord


def violations(records: Iterable[TurnRecord]) -> list[str]:
    """One sentence per broken rule; turns without a receipt are passed over."""
    found: list[str] = []
    last: dict[int, TurnRecord] = {}
    for record in sorted(records, key=lambda record: (record.conversation, record.turn)):
        if record.usage is None or record.error:
            continue
        found += _alone(record)
        before = last.get(record.conversation)
        if before is not None and before.turn == record.turn - 1:
            found += _against(before, record)
        last[record.conversation] = record
    return found


def _alone(record: TurnRecord) -> list[str]:
    usage, where, found = record.usage, _where(record), []
    assert usage is not None
    if not usage.reconciles:
        found.append(
            f"{where}: context {usage.context_tokens} is not gpu {usage.gpu_cached_tokens} + "
            f"swapped {usage.swapped_in_tokens} + recomputed {usage.recomputed_tokens} + new {usage.new_tokens}"
        )
    if usage.output_tokens != record.output_tokens:
        found.append(f"{where}: {record.output_tokens} tokens came, the receipt says {usage.output_tokens}")
    if record.turn == 0 and usage.recomputed_tokens:
        found.append(f"{where}: a first turn has {usage.recomputed_tokens} recomputed tokens")
    return found


def _against(before: TurnRecord, record: TurnRecord) -> list[str]:
    """What was found of the input, as in a beginning that another session has too, is not new: hence no equality."""
    assert before.usage is not None and record.usage is not None
    usage, where, found = record.usage, _where(record), []
    history = before.usage.context_tokens + before.usage.output_tokens
    told = f"the turn before had {before.usage.context_tokens} + output {before.usage.output_tokens}"
    if usage.context_tokens < history + usage.new_tokens:
        found.append(f"{where}: context {usage.context_tokens}, but {told}, and {usage.new_tokens} are new")
    if usage.recomputed_tokens > history:
        found.append(f"{where}: {usage.recomputed_tokens} are recomputed, but {told}")
    return found


def _where(record: TurnRecord) -> str:
    return f"conversation {record.conversation}, turn {record.turn}"
