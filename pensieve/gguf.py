"""Reads the headers of GGUF files: metadata, and the location of each tensor. Takes a fraction of a second.

The package ``gguf`` knows the tensor types. Its own reader makes several objects of each word of a
vocabulary, which takes seconds, and reports a truncated file by a NumPy error.
"""

from __future__ import annotations

import functools
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import UnionType
from typing import Any, Final

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
_SCALARS: Final = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""Type number of a value → its ``struct`` format."""
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS: Final = 4
_PART_NAME: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class GgufError(ValueError):
    """A GGUF file cannot be read; the message names the file and the problem, in one line."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as stored in the file."""

    file: Path
    start: int
    """Start of its data, in bytes from the start of the file."""
    nbytes: int
    shape: tuple[int, ...]
    """Values along each axis, the fastest last, as in torch and NumPy."""
    row_bytes: int
    type_name: str
    """Name in ``gguf.GGMLQuantizationType``: F32, Q4_K, …"""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The headers of a model's file, or of all its files when it is split."""

    path: Path
    """The file; of a split model the first one."""
    metadata: dict[str, Any]
    """Values by key: numbers, booleans, strings, and lists of these."""
    tensors: dict[str, TensorInfo]
    headers: tuple[tuple[Path, int], ...]
    """Each file with the length of its header in bytes."""

    def integer(self, key: str, default: int | None = None) -> int:
        """Return the integer under ``key``. Raises GgufError when it is another type, or missing without a default."""
        found: int = self._typed(key, default, int, "a whole number")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._typed(key, default, int | float, "a number"))

    def text(self, key: str, default: str | None = None) -> str:
        found: str = self._typed(key, default, str, "a string")
        return found

    def flag(self, key: str, default: bool) -> bool:
        """Return the boolean under ``key``. Raises GgufError on another type."""
        found: bool = self._typed(key, default, bool, "a boolean")
        return found

    def _typed(self, key: str, default: Any, kind: type | UnionType, what: str) -> Any:
        value = self.metadata.get(key, default)
        if value is None:
            raise GgufError(f"{self.path}: {key} is missing")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise GgufError(f"{self.path}: {key} is {_shown(value)}, not {what}")
        return value

    def items(self, key: str, kind: type) -> list[Any]:
        """Return the list under ``key``. Raises GgufError unless all items are of type ``kind``."""
        value = self.metadata.get(key)
        if value is None:
            raise GgufError(f"{self.path}: {key} is missing")
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise GgufError(f"{self.path}: {key} is not a list of {kind.__name__}")
        return value

    def eos_token_ids(self) -> list[int]:
        """Return the tokens that end an answer: end of text, of turn, of message to a tool. Each once, in
        this order. Raises GgufError."""
        keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        return list(dict.fromkeys(self.integer(key) for key in keys if key in self.metadata))


def is_gguf(path: Path) -> bool:
    """Whether a file begins as a GGUF file does, regardless of its name. Raises OSError when it is unreadable."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf(path: Path) -> GgufFile:
    """Read the headers of a model's file, or of all its files when it is one of several parts. Raises
    GgufError when a part is missing, truncated, of another version or byte order, or has tensors of an
    unreadable type; ModuleNotFoundError without the package ``gguf``."""
    first = _Header(path)
    if first.metadata.get("split.count", 1) in (0, 1):
        return GgufFile(path, first.metadata, first.tensors, ((path, first.length),))
    headers = [_Header(part) for part in _parts(path, first)]
    tensors: dict[str, TensorInfo] = {}
    for number, header in enumerate(headers):
        if header.metadata.get("split.no") != number or tensors.keys() & header.tensors.keys():
            raise GgufError(f"{header.path}: is not part {number + 1} of {len(headers)} of {headers[0].path}")
        tensors |= header.tensors
    expected = headers[0].metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise GgufError(
            f"{headers[0].path}: the parts hold {len(tensors)} tensors, the first one says {expected}"
        )
    lengths = tuple((header.path, header.length) for header in headers)
    return GgufFile(headers[0].path, headers[0].metadata, tensors, lengths)


def _parts(path: Path, header: _Header) -> list[Path]:
    """Return all files of a split model, in order, by the usual names."""
    count = header.metadata["split.count"]
    match = _PART_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise GgufError(
            f"{path}: is one of {count} parts, but its name does not give the others; name parts "
            f"NAME-00001-of-{count:05}.gguf"
        )
    parts = [
        path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)
    ]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise GgufError(f"{path}: is one of {count} parts, and {missing[0]} is not beside it")
    return parts


class _Header:
    """The header of one file. Raises GgufError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.length = 0
        """Bytes before the tensors' data."""
        try:
            self._size = path.stat().st_size
            with path.open("rb") as file:
                if not self._size or file.read(len(MAGIC)) != MAGIC:
                    raise GgufError(f"{path}: is not a GGUF file")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    self._data = data
                    self._read()
        except OSError as error:
            raise GgufError(f"{path}: cannot be read ({error.strerror})") from error
        except (struct.error, IndexError) as error:
            raise GgufError(f"{path}: is cut short: its header ends beyond its {self._size} bytes") from error
        except UnicodeDecodeError as error:
            raise GgufError(f"{path}: its header is damaged: a string that is not UTF-8") from error

    def _read(self) -> None:
        self._at = len(MAGIC)
        version = self._take("I")
        if version & 0xFFFF == 0:
            raise GgufError(f"{self.path}: is a big-endian GGUF file; convert it with gguf-convert-endian")
        if version not in VERSIONS:
            raise GgufError(f"{self.path}: GGUF version {version} is not supported (supported: 2, 3)")
        tensor_count, key_count = self._take("Q"), self._take("Q")
        for _ in range(key_count):
            key, kind = self._string(), self._take("I")
            if key in self.metadata:
                raise GgufError(f"{self.path}: its header is damaged: {_shown(key)} appears twice")
            self.metadata[key] = self._value(kind, key)
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise GgufError(f"{self.path}: general.alignment is {_shown(alignment)}, not a power of two")
        found = [self._tensor() for _ in range(tensor_count)]
        self.length = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in found:
            if name in self.tensors:
                raise GgufError(f"{self.path}: its header is damaged: tensor {_shown(name)} appears twice")
            self.tensors[name] = self._place(name, shape, kind, self.length + offset)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._string(), self._take("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise GgufError(
                f"{self.path}: its header is damaged: tensor {_shown(name)} has {dimensions} axes"
            )
        shape = tuple(self._take("Q") for _ in range(dimensions))
        return name, shape[::-1], self._take("I"), self._take("Q")

    def _place(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> TensorInfo:
        type_name, block, block_bytes = _tensor_type(kind)
        if not block:
            raise GgufError(f"{self.path}: tensor {name} has type {type_name}, which cannot be read")
        if shape[-1] % block:
            raise GgufError(
                f"{self.path}: tensor {name} has rows of {shape[-1]} values, in blocks of {block} ({type_name})"
            )
        row_bytes = shape[-1] // block * block_bytes
        nbytes = prod(shape[:-1]) * row_bytes
        if start + nbytes > self._size:
            raise GgufError(
                f"{self.path}: is cut short: tensor {name} ends at byte {start + nbytes}, the file has {self._size}"
            )
        return TensorInfo(self.path, start, nbytes, shape, row_bytes, type_name)

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._take(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return list(self._array(key))
        raise GgufError(f"{self.path}: its header is damaged: {_shown(key)} has a value of type {kind}")

    def _array(self, key: str) -> Iterator[Any]:
        kind, count = self._take("I"), self._take("Q")
        if kind in _SCALARS:
            width = struct.calcsize(_SCALARS[kind])
            if self._at + count * width > self._size:
                raise IndexError
            yield from struct.unpack_from(f"<{count}{_SCALARS[kind]}", self._data, self._at)
            self._at += count * width
        else:
            for _ in range(count):
                yield self._value(kind, key)

    def _string(self) -> str:
        length = self._take("Q")
        end = self._at + length
        if end > self._size:
            raise IndexError
        found = self._data[self._at : end]
        self._at = end
        return found.decode("utf-8")

    def _take(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return value


@functools.cache
def _tensor_type(kind: int) -> tuple[str, int, int]:
    """Return a tensor type's name, values per block and bytes per block; 0 values when it cannot be dequantised."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    try:
        known = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[known]
    except (ValueError, KeyError):
        return str(kind), 0, 0
    try:
        dequantize(np.zeros((1, block_bytes), dtype=np.uint8), known)
    except NotImplementedError:
        return known.name, 0, 0
    return known.name, block, block_bytes


def _shown(value: object) -> str:
    """Shorten a value for an error message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
