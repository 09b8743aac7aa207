"""Datasets: conversations as lengths, with the beginnings that they share, cut to a requested shape."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

RECORDED = "pensieve.trace/1"

RECEIPT_FIELDS: Final = ("gpu_cached_tokens", "swapped_in_tokens", "recomputed_tokens")

HASH_BLOCK_TOKENS: Final = 512
"""Tokens per entry of ``hash_ids`` in a length trace, as in the traces of Mooncake."""

CountTokens = Callable[[str], int]

Piece = tuple[str, int]
"""(name of a text, number of its leading tokens)."""


_Row = tuple[int, "TurnLengths", dict[str, Any]]


class DatasetError(ValueError):
    """The file is not a dataset; the message names the place."""


@dataclass(frozen=True, slots=True)
class TurnLengths:
    input_tokens: int
    output_tokens: int
    timestamp_s: float | None = None
    receipt: tuple[int, int, int] | None = None
    """Tokens of the context found on the device, found on the host, and recomputed; None: not recorded."""


@dataclass(frozen=True, slots=True)
class Conversation:
    key: str
    turns: tuple[TurnLengths, ...]
    prefix: tuple[Piece, ...] = ()
    """Pieces that the first input begins with; at least one more token follows.

    Two conversations begin with the same tokens as far as their pieces are the same.
    """

    @property
    def tokens(self) -> int:
        """Context length after the last answer."""
        return sum(turn.input_tokens + turn.output_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Dataset:
    name: str
    conversations: tuple[Conversation, ...]
    sha256: str

    @property
    def recorded_arrivals(self) -> bool:
        return all(turn.timestamp_s is not None for talk in self.conversations for turn in talk.turns)


def estimate_tokens(text: str) -> int:
    """Estimate the tokens of English text: one per four characters, and at least three per four words."""
    return max(1, round(len(text) / 4), round(len(text.split()) * 0.75))


def load(path: Path, count_tokens: CountTokens = estimate_tokens, *, limit: int | None = None) -> Dataset:
    """Load ShareGPT JSON or a length trace (JSONL), either optionally gzipped.

    In a trace written by ``pensieve serve --record``, turns that were not kept are left out. So are answers
    without a token; their input is added to the next turn.

    The first row of a session declares its shared beginning: with ``prefix``, the first ``prefix_tokens``
    tokens are those of the text of that name; with ``hash_ids``, one per ``HASH_BLOCK_TOKENS``, equal ids
    mean equal tokens.

    Raises DatasetError.
    """
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    try:
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path}: {error}") from error
    if text.lstrip().startswith("["):
        conversations = _share_gpt(path, text, count_tokens, limit)
    else:
        conversations = parse_length_trace(path, text)[:limit]
    if not conversations:
        raise DatasetError(f"{path}: no conversation with an answered turn")
    return Dataset(path.name, tuple(conversations), digest)


def _share_gpt(path: Path, text: str, count: CountTokens, limit: int | None) -> list[Conversation]:
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise DatasetError(f"{path}: {error}") from error
    found: list[Conversation] = []
    for number, entry in enumerate(entries):
        if limit is not None and len(found) == limit:
            break
        if not isinstance(entry, dict) or not isinstance(entry.get("conversations"), list):
            raise DatasetError(f"{path}: entry {number} has no list `conversations`")
        turns = _pair_turns(_messages(path, number, entry["conversations"]), count)
        if turns:
            found.append(Conversation(str(entry.get("id", number)), tuple(turns)))
    return found


def _messages(path: Path, number: int, messages: list[Any]) -> Iterable[tuple[bool, str]]:
    """Yield (is it the user's, text) pairs; system messages count as the user's."""
    for message in messages:
        try:
            speaker, text = str(message["from"]), str(message["value"])
        except (KeyError, TypeError) as error:
            raise DatasetError(f"{path}: a message of entry {number} has no `from` and `value`") from error
        yield speaker in ("human", "user", "system"), text


def _pair_turns(messages: Iterable[tuple[bool, str]], count: CountTokens) -> list[TurnLengths]:
    """Pair inputs with answers; an answer without input and an input without answer are left out."""
    turns: list[TurnLengths] = []
    inputs: list[str] = []
    for is_user, text in messages:
        if is_user:
            inputs.append(text)
        elif inputs:
            turns.append(TurnLengths(max(1, count("\n".join(inputs))), max(1, count(text))))
            inputs = []
    return turns


def parse_length_trace(path: Path, text: str) -> list[Conversation]:
    """Parse a length trace. ``path`` is for error messages. Raises DatasetError."""
    rows: dict[str, list[_Row]] = {}
    headers = 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if "schema" in row:
                headers = _check_header(path, number, row, headers)
                continue
            if not row.get("committed", True):
                continue
            stamp = row.get("timestamp_s")
            receipt = [int(row[name]) for name in RECEIPT_FIELDS] if RECEIPT_FIELDS[0] in row else None
            turn = TurnLengths(
                int(row["input_tokens"]),
                int(row["output_tokens"]),
                None if stamp is None else float(stamp),
                None if receipt is None else (receipt[0], receipt[1], receipt[2]),
            )
            entry = int(row["turn"]), turn, row
            session = str(row["session_id"])
        except DatasetError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DatasetError(
                f"{path}, line {number}: needs session_id, turn, input_tokens, output_tokens[, timestamp_s]: {error!r}"
            ) from error
        if turn.input_tokens < 1 or turn.output_tokens < (0 if "committed" in row else 1):
            raise DatasetError(
                f"{path}, line {number}: a turn needs at least one input token and one output token"
            )
        rows.setdefault(session, []).append(entry)
    ordered = [(key, sorted(turns, key=lambda entry: entry[0])) for key, turns in rows.items()]
    prefixes = _shared_prefixes(path, [(key, turns[0]) for key, turns in ordered])
    found = (
        Conversation(key, _merge_unanswered(turn for _, turn, _ in turns), prefix)
        for (key, turns), prefix in zip(ordered, prefixes, strict=True)
    )
    return [talk for talk in found if talk.turns]


def _shared_prefixes(path: Path, firsts: Sequence[tuple[str, _Row]]) -> list[tuple[Piece, ...]]:
    """Shared beginning of each session, from its first row. Raises DatasetError."""
    found: list[tuple[Piece, ...]] = []
    hashed: Counter[str] = Counter()
    for key, (_, turn, row) in firsts:
        try:
            found.append(_pieces(row))
        except (ValueError, KeyError, TypeError) as error:
            raise DatasetError(
                f"{path}, session {key}: `prefix` needs prefix_tokens, `hash_ids` must be a list: {error!r}"
            ) from error
        if "prefix" in row and not 0 < found[-1][0][1] < turn.input_tokens:
            raise DatasetError(
                f"{path}, session {key}: prefix_tokens must be at least 1 and less than the first input, "
                f"which has {turn.input_tokens} tokens"
            )
        hashed.update(name for name, _ in found[-1])
    # Most blocks belong to a single session: dropping them saves memory.
    kept = [_shared_part(pieces, hashed) if "prefix" not in row else pieces
            for (_, (_, _, row)), pieces in zip(firsts, found, strict=True)]  # fmt: skip
    return [
        truncate_pieces(pieces, turn.input_tokens - 1)
        for (_, (_, turn, _)), pieces in zip(firsts, kept, strict=True)
    ]


def _pieces(row: Mapping[str, Any]) -> tuple[Piece, ...]:
    if "prefix" in row:
        return ((str(row["prefix"]), int(row["prefix_tokens"])),)
    return tuple((f"block {number}", HASH_BLOCK_TOKENS) for number in row.get("hash_ids", ()))


def _shared_part(pieces: tuple[Piece, ...], count: Mapping[str, int]) -> tuple[Piece, ...]:
    last = max((at for at, (name, _) in enumerate(pieces, 1) if count[name] > 1), default=0)
    return pieces[:last]


def truncate_pieces(pieces: tuple[Piece, ...], most: int) -> tuple[Piece, ...]:
    kept: list[Piece] = []
    for name, tokens in pieces:
        if most <= 0:
            break
        kept.append((name, min(tokens, most)))
        most -= tokens
    return tuple(kept)


def _check_header(path: Path, number: int, row: dict[str, Any], headers: int) -> int:
    """Check a header row; return the number of headers. A second one restarts the clock, so times would overlap."""
    if row["schema"] != RECORDED:
        raise DatasetError(f"{path}, line {number}: schema {row['schema']!r} is not {RECORDED}")
    if headers:
        raise DatasetError(
            f"{path}, line {number}: a second recording starts here; split the file before this line"
        )
    return headers + 1


def _merge_unanswered(turns: Iterable[TurnLengths]) -> tuple[TurnLengths, ...]:
    """Prepend each input without an answer to the next input, so that contexts keep their lengths."""
    kept: list[TurnLengths] = []
    unanswered = 0
    for turn in turns:
        if turn.output_tokens:
            kept.append(replace(turn, input_tokens=turn.input_tokens + unanswered))
            unanswered = 0
        else:
            unanswered += turn.input_tokens
    return tuple(kept)


@dataclass(frozen=True, slots=True)
class Shaping:
    """Requested changes of a workload; None: as recorded."""

    scale_lengths: float = 1.0
    """Factor of every length, for models with short contexts; no length falls below one token."""
    max_turns: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    system_tokens: int = 0
    """Tokens put before the first input of every conversation, the same for all."""


@dataclass(frozen=True, slots=True)
class Shaped:
    conversations: tuple[Conversation, ...]
    cut_conversations: int
    """Conversations that end early because the context would not fit."""
    dropped_conversations: int
    """Conversations left out because not even their first turn fits."""
    dropped_turns: int

    @property
    def turns(self) -> int:
        return sum(len(talk.turns) for talk in self.conversations)


def shape(conversations: Iterable[Conversation], wanted: Shaping, context_limit: int) -> Shaped:
    """Cut ``conversations`` so that contexts stay below ``context_limit``, the smallest of all targets."""
    kept: list[Conversation] = []
    cut = dropped = turns_lost = 0
    for talk in conversations:
        turns = [_resized(turn, wanted) for turn in talk.turns[: wanted.max_turns]]
        prefix = _prefix(talk.prefix, wanted, turns[0].input_tokens)
        if wanted.system_tokens:
            turns[0] = replace(turns[0], input_tokens=wanted.system_tokens + turns[0].input_tokens)
        kept_turns = _fitting(turns, context_limit)
        turns_lost += len(turns) - len(kept_turns)
        if not kept_turns:
            dropped += 1
            continue
        cut += len(kept_turns) < len(turns)
        kept.append(Conversation(talk.key, tuple(kept_turns), prefix))
    return Shaped(tuple(kept), cut, dropped, turns_lost)


def _prefix(pieces: tuple[Piece, ...], wanted: Shaping, first_input: int) -> tuple[Piece, ...]:
    """Scale the shared pieces; they leave at least one token of the first input."""
    scaled = ((name, round(tokens * wanted.scale_lengths)) for name, tokens in pieces)
    kept = truncate_pieces(tuple(piece for piece in scaled if piece[1]), first_input - 1)
    return (("system prompt of all", wanted.system_tokens), *kept) if wanted.system_tokens else kept


def _resized(turn: TurnLengths, wanted: Shaping) -> TurnLengths:
    def size(tokens: int, limit: int | None) -> int:
        scaled = max(1, round(tokens * wanted.scale_lengths))
        return scaled if limit is None else min(scaled, limit)

    return replace(
        turn,
        input_tokens=size(turn.input_tokens, wanted.max_input_tokens),
        output_tokens=size(turn.output_tokens, wanted.max_output_tokens),
    )


def _fitting(turns: list[TurnLengths], limit: int) -> list[TurnLengths]:
    total = 0
    for index, turn in enumerate(turns):
        total += turn.input_tokens + turn.output_tokens
        if total >= limit:
            return turns[:index]
    return turns
