"""Conversations as lengths: what a replay needs to know of a dataset."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

RECORDED = "pensieve.trace/1"
"""What the header of a trace written by ``pensieve serve --record`` says."""

CountTokens = Callable[[str], int]


class DatasetError(ValueError):
    """The file is not a dataset; the message names the place."""


@dataclass(frozen=True, slots=True)
class TurnLengths:
    """One user input and the answer to it, in tokens."""

    input_tokens: int
    output_tokens: int
    timestamp_s: float | None = None
    """When it was sent in the recording."""


@dataclass(frozen=True, slots=True)
class Conversation:
    key: str
    turns: tuple[TurnLengths, ...]

    @property
    def tokens(self) -> int:
        """Length of the context after the last answer."""
        return sum(turn.input_tokens + turn.output_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Dataset:
    name: str
    conversations: tuple[Conversation, ...]
    sha256: str

    @property
    def recorded_arrivals(self) -> bool:
        """Whether every turn says when it was sent."""
        return all(turn.timestamp_s is not None for talk in self.conversations for turn in talk.turns)


def estimate_tokens(text: str) -> int:
    """Tokens of English text, roughly: a token per four characters, and at least three for four words."""
    return max(1, round(len(text) / 4), round(len(text.split()) * 0.75))


def load(path: Path, count_tokens: CountTokens = estimate_tokens, *, limit: int | None = None) -> Dataset:
    """ShareGPT JSON or a length trace (JSONL), either maybe gzipped. ``limit``: the first so many conversations.

    A trace may be one that ``pensieve serve --record`` wrote: turns that were not kept are left out, and so are
    answers without a token, whose input is counted to the next turn.

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
        conversations = _length_trace(path, text)[:limit]
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
        turns = _answered(_messages(path, number, entry["conversations"]), count)
        if turns:
            found.append(Conversation(str(entry.get("id", number)), tuple(turns)))
    return found


def _messages(path: Path, number: int, messages: list[Any]) -> Iterable[tuple[bool, str]]:
    """(is it the user's, text) pairs; system messages count as the user's."""
    for message in messages:
        try:
            speaker, text = str(message["from"]), str(message["value"])
        except (KeyError, TypeError) as error:
            raise DatasetError(f"{path}: a message of entry {number} has no `from` and `value`") from error
        yield speaker in ("human", "user", "system"), text


def _answered(messages: Iterable[tuple[bool, str]], count: CountTokens) -> list[TurnLengths]:
    """Pairs of input and answer; an answer without input and an input without answer are left out."""
    turns: list[TurnLengths] = []
    asked: list[str] = []
    for is_user, text in messages:
        if is_user:
            asked.append(text)
        elif asked:
            turns.append(TurnLengths(max(1, count("\n".join(asked))), max(1, count(text))))
            asked = []
    return turns


def _length_trace(path: Path, text: str) -> list[Conversation]:
    rows: dict[str, list[tuple[int, TurnLengths]]] = {}
    headers = 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if "schema" in row:
                headers = _header(path, number, row, headers)
                continue
            if not row.get("committed", True):
                continue
            stamp = row.get("timestamp_s")
            turn = TurnLengths(
                int(row["input_tokens"]), int(row["output_tokens"]), None if stamp is None else float(stamp)
            )
            entry = int(row["turn"]), turn
            session = str(row["session_id"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, DatasetError):
                raise
            raise DatasetError(
                f"{path}, line {number}: wants session_id, turn, input_tokens, output_tokens[, timestamp_s]: {error!r}"
            ) from error
        if turn.input_tokens < 1 or turn.output_tokens < (0 if "committed" in row else 1):
            raise DatasetError(f"{path}, line {number}: a turn has at least one token each way")
        rows.setdefault(session, []).append(entry)
    ordered = ((key, sorted(turns, key=lambda pair: pair[0])) for key, turns in rows.items())
    found = (Conversation(key, _with_answers(turn for _, turn in turns)) for key, turns in ordered)
    return [talk for talk in found if talk.turns]


def _header(path: Path, number: int, row: dict[str, Any], headers: int) -> int:
    """How many headers there were now. A second one starts the clock anew, so times would overlap."""
    if row["schema"] != RECORDED:
        raise DatasetError(f"{path}, line {number}: schema {row['schema']!r} is not {RECORDED}")
    if headers:
        raise DatasetError(
            f"{path}, line {number}: a second recording starts here; split the file before this line"
        )
    return headers + 1


def _with_answers(turns: Iterable[TurnLengths]) -> tuple[TurnLengths, ...]:
    """An input without an answer is put before the next one, so that contexts keep their lengths."""
    kept: list[TurnLengths] = []
    waiting = 0
    for turn in turns:
        if turn.output_tokens:
            kept.append(replace(turn, input_tokens=turn.input_tokens + waiting))
            waiting = 0
        else:
            waiting += turn.input_tokens
    return tuple(kept)
