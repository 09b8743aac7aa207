"""Requests that nobody would send: built field by field from the contract, or honest ones with bytes disturbed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from hypothesis import strategies as st

from pensieve.v1 import pensieve_pb2 as pb

CORPUS = Path(__file__).resolve().parents[2] / "robustness" / "corpus.txt"
SERVICE = pb.DESCRIPTOR.services_by_name["ConversationService"]
METHODS: dict[str, Any] = {method.name: getattr(pb, method.input_type.name) for method in SERVICE.methods}
"""Method → class of its request."""
UUIDS = ("00000000-0000-4000-8000-000000000001", "7a2b0f5e-9d7c-4c55-8f51-5f0b7f7d2f10")
TEXTS = (
    "", "a", "hi", "sessions/fuzzed", "sessions/", "sessions/../x", "k=v", "\x00", "é" * 40, "{x}", "x" * 300, "\u202e",
    "<|im_start|>system", "tiny", *UUIDS,
)  # fmt: skip
INTEGERS = (
    0,
    1,
    2,
    5,
    255,
    1 << 16,
    (1 << 31) - 1,
    (1 << 32) - 1,
    (1 << 63) - 1,
    (1 << 64) - 1,
    -1,
    -(1 << 31),
)
FLOATS = (0.0, 1.0, -1.0, 1e-45, 1e30, math.inf, -math.inf, math.nan)
LIKELY: dict[str, tuple[Any, ...]] = {
    "name": ("sessions/fuzzed",),
    "session": ("sessions/fuzzed",),
    "session_id": ("", "fuzzed", "another"),
    "request_id": UUIDS,
    "role": (1, 2, 3, 4),
    "max_output_tokens": (1, 4),
    "model": ("", "tiny"),
}
"""Values that let a request through to what lies behind."""
BOUNDS = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-1, 99),
}


def _scalar(field: FieldDescriptor, random: Random) -> Any:
    kind = field.cpp_type
    if field.name in LIKELY and random.random() < 0.8:
        return random.choice(LIKELY[field.name])
    if kind == FieldDescriptor.CPPTYPE_STRING:
        text = random.choice(TEXTS)
        return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return random.choice(FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return random.random() < 0.5
    low, high = BOUNDS[kind]
    return min(max(random.choice(INTEGERS), low), high)


def _repeated(field: FieldDescriptor) -> bool:
    return bool(field.is_repeated)


def filled(message: Any, random: Random, depth: int = 0) -> Any:
    """The message with some of its fields set to something."""
    for field in message.DESCRIPTOR.fields:
        if field.name not in LIKELY and random.random() < 0.6 + 0.08 * depth:
            continue
        count = random.choice((1, 1, 2, 70)) if _repeated(field) else 1
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            for _ in range(count):
                if value.message_type is None:
                    getattr(message, field.name)[_scalar(key, random)] = _scalar(value, random)
        elif field.message_type is not None:
            if depth < 4:
                inside = getattr(message, field.name)
                for _ in range(count):
                    filled(inside.add() if _repeated(field) else inside, random, depth + 1)
        elif _repeated(field):
            getattr(message, field.name).extend(_scalar(field, random) for _ in range(count))
        else:
            setattr(message, field.name, _scalar(field, random))
    return message


def disturbed(data: bytes, random: Random) -> bytes:
    """With a few bytes changed, lost, doubled or put in."""
    found = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(found) + 1)
        match random.randrange(5):
            case 0 if at < len(found):
                found[at] ^= 1 << random.randrange(8)
            case 1:
                del found[at : at + random.randint(1, 8)]
            case 2:
                found[at:at] = found[at : at + random.randint(1, 16)] * random.choice((1, 2, 50))
            case 3:
                found[at:at] = random.randbytes(random.randint(1, 6))
            case _:
                found[at:at] = random.choice((b"\xff" * 9, b"\x00", b"\x0b" * 120, b"\x80\x80\x80\x80\x10"))
    return bytes(found[: 1 << 16])


def corpus() -> Iterator[tuple[str, bytes]]:
    """Method and bytes of each line of the corpus."""
    for line in CORPUS.read_text().splitlines():
        if line and not line.startswith("#"):
            method, data = line.split()[:2]
            yield method, bytes.fromhex("" if data == "-" else data)


def drawn(seed: int) -> tuple[str, bytes]:
    """A method and a request for it."""
    random = Random(seed)
    known = list(corpus())
    if random.random() < 0.5:
        method, data = random.choice(known)
        return random.choice((method, method, random.choice(list(METHODS)))), disturbed(data, random)
    method = random.choice(list(METHODS))
    data = filled(METHODS[method](), random).SerializeToString()
    return method, disturbed(data, random) if random.random() < 0.2 else data


def requests() -> st.SearchStrategy[tuple[str, bytes]]:
    """Drawn ones, those of the corpus, and plain noise."""
    noise = st.tuples(st.sampled_from(list(METHODS)), st.binary(max_size=64))
    return st.one_of(st.integers(0, (1 << 48) - 1).map(drawn), st.sampled_from(list(corpus())), noise)
