"""Bytes of records, the hash chain, store URLs."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zlib
from collections.abc import Callable
from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve.core import FinishReason, Role, pack_tokens
from pensieve.errors import DataLoss, FailedPrecondition
from pensieve.store import _codec, open_store
from pensieve.store._codec import StoredRecord
from pensieve.store.memory_store import MemoryStore
from pensieve.store.records import CandidateAnswer, CandidateChange, Item, Record, RecordKind, SessionRow
from pensieve.store.redis_store import RedisStore
from pensieve.store.sqlite_store import SqliteStore
from support.store.store_bench import first_record, key, rewind_record, turn_record


@pytest.mark.parametrize(
    "record", [first_record(), turn_record(3, "r1", "h\N{ELEPHANT}"), rewind_record(2, "w", 1)]
)
def test_records_come_back_as_they_were(record: Record) -> None:
    assert _codec.decode_record(_codec.encode_record(record)) == record


@given(st.binary(max_size=200), st.booleans())
def test_bytes_that_are_no_record_are_refused_cleanly(noise: bytes, right_format: bool) -> None:
    with pytest.raises((msgspec.MsgspecError, ValueError, FailedPrecondition)):
        _codec.decode_record(bytes((_codec.FORMAT,)) + noise if right_format else noise)


@given(st.data())
def test_a_cut_record_is_refused(data: st.DataObject) -> None:
    whole = _codec.encode_record(turn_record(1, "r1"))
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises((msgspec.MsgspecError, ValueError)):
        _codec.decode_record(whole[:cut])


@pytest.mark.fault(53)
def test_a_newer_format_is_told_apart_from_damage() -> None:
    with pytest.raises(FailedPrecondition) as caught:
        _codec.decode_record(bytes((_codec.FORMAT_ERASED + 1,)) + _codec.encode_record(first_record())[1:])
    assert caught.value.reason == "STORE_VERSION"


def test_the_chain_depends_on_all_before_it() -> None:
    one, two = _codec.chain_hash("", b"one"), _codec.chain_hash("", b"two")
    assert _codec.chain_hash(one, b"x") != _codec.chain_hash(two, b"x") != _codec.chain_hash("", b"x")
    assert _codec.chain_hash(one, b"x") == _codec.chain_hash(one, b"x")


def test_stored_bytes_stay_readable() -> None:
    """The first format, byte for byte: a change here would make existing conversations unreadable."""
    stored = _codec.make_stored_record(rewind_record(1, "w1", keep=1), "")
    assert stored.data.hex() == (
        "0185a87265766973696f6e02a46b696e64a6726577696e64a774696d655f6d7303"
        "aa726571756573745f6964a27731aa6b6565705f6974656d7301"
    )
    assert stored.crc == 1155924713
    assert stored.head_hash == "915ce7a1b90f721b1b14072d7601bca8a17a0274"


def test_stored_turns_stay_as_they_were() -> None:
    """Answers beside the committed one take no byte where there are none, and old bytes say that there are none."""
    plain = turn_record(1, "r1")
    data = _codec.encode_record(plain)
    assert hashlib.sha256(data).hexdigest() == (
        "95de05c788b6f63be936d6bedf7261f23524d52b11e36c6b0c5551bc64de713a"
    )
    read = _codec.decode_record(data)
    assert read.turn is not None and (read.turn.candidates, read.turn.chosen) == ((), 0)
    assert read.candidate is None


def test_all_answers_of_a_turn_and_the_choice_among_them_come_back() -> None:
    plain = turn_record(1, "r1")
    assert plain.turn is not None
    drawn = tuple(
        CandidateAnswer(
            f"answer {i}", pack_tokens([4, i]), FinishReason.EOS, "x" * i, 2**64 - 1 - i, -0.5 * i
        )
        for i in range(16)
    )
    result = msgspec.structs.replace(plain.turn, candidates=drawn, chosen=3)
    turn = msgspec.structs.replace(plain, turn=result)
    change = Record(revision=3, kind=RecordKind.UPDATE, time_ms=3, keep_items=2, items=(plain.items[-1],),
                    candidate=CandidateChange(turn_revision=2, candidate=1))  # fmt: skip
    for record in (turn, change):
        assert _codec.decode_record(_codec.encode_record(record)) == record


class OldRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A record as programs knew it that drew one answer a turn."""

    revision: int
    kind: Literal["create", "turn", "rewind", "update"]
    time_ms: int
    keep_items: int | None = None
    items: tuple[Item, ...] = ()


def test_a_choice_is_an_update_like_any_other_to_older_programs() -> None:
    item = Item(number=4, role=Role.ASSISTANT, text="b", tokens=b"")
    change = Record(revision=3, kind=RecordKind.UPDATE, time_ms=3, keep_items=2, items=(item,),
                    candidate=CandidateChange(turn_revision=2, candidate=1))  # fmt: skip
    read = msgspec.msgpack.decode(_codec.encode_record(change)[1:], type=OldRecord)
    assert (read.keep_items, read.items) == (2, (item,))


def sound_log() -> list[StoredRecord]:
    log: list[StoredRecord] = []
    for record in (first_record(), turn_record(1, "r1"), rewind_record(2, "w1")):
        log.append(_codec.make_stored_record(record, log[-1].head_hash if log else ""))
    return log


def read(log: list[StoredRecord], *, revision: int = 3, head_hash: str | None = None) -> int:
    head = sound_log()[revision - 1].head_hash if head_hash is None else head_hash
    at = key()
    row = SessionRow(tenant=at.tenant, session_id=at.session_id, revision=revision, head_hash=head)
    return len(_codec.read_log(at, row, log, after_revision=0, head_hash=""))


def test_a_sound_log_is_read() -> None:
    assert read(sound_log()) == 3


@pytest.mark.fault(43)
@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (lambda log: log.__setitem__(1, log[1]._replace(crc=log[1].crc ^ 1)), "record 2 fails its checksum"),
        (lambda log: log.__setitem__(1, log[1]._replace(head_hash="00" * 20)), "record 2 does not continue"),
        (
            lambda log: log.__setitem__(2, _codec.make_stored_record(turn_record(2, "x"), log[1].head_hash)),
            "record 3 is not",
        ),
        (
            lambda log: log.__setitem__(2, _codec.make_stored_record(turn_record(5, "x"), log[1].head_hash)),
            "record 3 is miss",
        ),
        (
            lambda log: log.append(_codec.make_stored_record(turn_record(3, "x"), log[2].head_hash)),
            "record 4 is not",
        ),
        (lambda log: log.insert(1, log[0]), "record 2 is missing"),
        (lambda log: log.clear(), "record 1 is missing"),
    ],
)
def test_each_way_to_change_a_log_is_named(fault: Callable[[list[StoredRecord]], None], problem: str) -> None:
    log = sound_log()
    fault(log)
    with pytest.raises(DataLoss, match=problem) as caught:
        read(log)
    assert caught.value.reason == "HISTORY_CORRUPT"


def test_a_record_under_anothers_number_is_named() -> None:
    log = sound_log()
    data = _codec.encode_record(turn_record(7, "x"))
    forged = StoredRecord(3, data, zlib.crc32(data), _codec.chain_hash(log[1].head_hash, data))
    with pytest.raises(DataLoss, match="record 3 says it is revision 8"):
        read([*log[:2], forged], head_hash=forged.head_hash)


def test_urls() -> None:
    assert isinstance(open_store("memory:"), MemoryStore)
    assert isinstance(open_store("redis://127.0.0.1:1/0"), RedisStore)
    relative, absolute = open_store("sqlite:///a/b.db"), open_store("sqlite:////a/b.db")
    assert isinstance(relative, SqliteStore)
    assert isinstance(absolute, SqliteStore)
    assert (str(relative.path), str(absolute.path)) == ("a/b.db", "/a/b.db")


@pytest.mark.parametrize(
    "url", ["", "nope:", "sqlite:", "sqlite:///", "sqlite://a.db", "sqlite:///dir/", "/a.db"]
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(ValueError, match="use "):
        open_store(url)


def test_stores_import_without_torch() -> None:
    modules = "pensieve.store.memory_store, pensieve.store.sqlite_store, pensieve.store.redis_store"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
