"""Plain memory that backs a region on a CPU: parts of a memory file, mapped and unmapped at fixed addresses.

A handle is a place in the file. Its memory is taken when a byte of it is first written, and a hole punched into the
file gives it back, so ``st_blocks`` of the file counts resident memory.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import weakref
from typing import Any, Final

import torch

PROT_NONE: Final = 0
PROT_READ_WRITE: Final = 0x1 | 0x2
MAP_SHARED: Final = 0x1
MAP_PRIVATE: Final = 0x2
MAP_FIXED: Final = 0x10
MAP_ANONYMOUS: Final = 0x20
MAP_NORESERVE: Final = 0x4000
FALLOC_FL_KEEP_SIZE: Final = 0x1
FALLOC_FL_PUNCH_HOLE: Final = 0x2
MAP_FAILED: Final = ctypes.c_void_p(-1).value


def refusal() -> str:
    """Return why this system cannot back a region, in one clause; "": it can."""
    if not hasattr(os, "memfd_create"):
        return "this system has no memory files (memfd_create)"
    return ""


class PlainBackend:
    """``region.Backend`` on Linux."""

    granule = mmap.PAGESIZE

    def __init__(self) -> None:
        self._libc = _libc()
        self._file = -1
        self._end = 0
        """Size of the file."""
        self._free: list[tuple[int, int]] = []
        """Released parts of the file, (start, bytes), ascending."""
        self._start = self._num_bytes = 0

    @property
    def resident(self) -> int:
        """Bytes of memory that the file takes."""
        return os.fstat(self._file).st_blocks * 512

    def reserve(self, num_bytes: int) -> None:
        """See ``region.Backend``."""
        address = self._map(None, num_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)
        self._file = os.memfd_create("pensieve-device-tier")
        # Any object that holds the tensor holds this, so the addresses are given back after the last view of them.
        self._range: Any = (ctypes.c_uint8 * num_bytes).from_address(address)
        self._finalizer = weakref.finalize(self._range, _give_back, address, num_bytes, self._file)
        self._finalizer.atexit = False  # the process ends, and tensors may be in use until then
        self._start, self._num_bytes = address, num_bytes

    def tensor(self, num_bytes: int) -> torch.Tensor:
        """See ``region.Backend``."""
        return torch.frombuffer(self._range, dtype=torch.uint8)[:num_bytes]

    def create(self, num_bytes: int) -> int:
        """See ``region.Backend``: a handle is the start of its part of the file."""
        for index, (start, size) in enumerate(self._free):
            if size >= num_bytes:
                self._free[index : index + 1] = (
                    [(start + num_bytes, size - num_bytes)] if size > num_bytes else []
                )
                return start
        start = self._end
        try:
            os.ftruncate(self._file, start + num_bytes)
        except OSError as error:
            raise MemoryError(f"no memory for {num_bytes} bytes: {error}") from error
        self._end += num_bytes
        return start

    def map(self, offset: int, num_bytes: int, handle: int) -> None:
        """See ``region.Backend``."""
        flags = MAP_SHARED | MAP_FIXED
        self._map(self._start + offset, num_bytes, PROT_READ_WRITE, flags, self._file, handle)

    def unmap(self, offset: int, num_bytes: int) -> None:
        """See ``region.Backend``."""
        flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
        self._map(self._start + offset, num_bytes, PROT_NONE, flags)

    def release(self, handle: int, num_bytes: int) -> None:
        """See ``region.Backend``."""
        mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
        if self._libc.fallocate(self._file, mode, handle, num_bytes):
            raise _error("fallocate")
        at = bisect.bisect(self._free, (handle, 0))
        before, after = self._free[:at], self._free[at:]
        start, end = handle, handle + num_bytes
        if before and sum(before[-1]) == start:
            start = before.pop()[0]
        if after and after[0][0] == end:
            end += after.pop(0)[1]
        self._free = [*before, (start, end - start), *after]

    def free(self) -> None:
        """See ``region.Backend``. The addresses stay reserved until no tensor views them."""
        self._range = None

    def _map(
        self, address: int | None, num_bytes: int, access: int, flags: int, file: int = -1, offset: int = 0
    ) -> int:
        found = self._libc.mmap(address, num_bytes, access, flags, file, offset)
        if found == MAP_FAILED:
            raise _error("mmap")
        return int(found)


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    )  # fmt: skip
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return libc


def _error(call: str) -> OSError | MemoryError:
    code = ctypes.get_errno()
    why = f"{call}: {os.strerror(code)}"
    return MemoryError(why) if code in (12, 28) else OSError(code, why)  # ENOMEM, ENOSPC


def _give_back(address: int, num_bytes: int, file: int) -> None:
    """Unmap a range and give the memory of its file back."""
    _libc().munmap(address, num_bytes)
    os.close(file)
