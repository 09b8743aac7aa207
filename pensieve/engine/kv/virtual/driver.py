"""GPU memory that backs a region: CUDA's virtual memory by the driver's own calls (vAttention, section 5.2.1).

torch wraps none of these calls. Its expandable segments use them, but cannot give back a part of a live tensor.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch

SUCCESS: Final = 0
OUT_OF_MEMORY: Final = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""
PINNED: Final = 1
"""CU_MEM_ALLOCATION_TYPE_PINNED: memory of the device."""
ON_DEVICE: Final = 1
"""CU_MEM_LOCATION_TYPE_DEVICE."""
READ_WRITE: Final = 3
"""CU_MEM_ACCESS_FLAGS_PROT_READWRITE."""
MINIMUM: Final = 0
"""CU_MEM_ALLOC_GRANULARITY_MINIMUM."""
SUPPORTED: Final = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED."""

_SIZE, _POINTER, _ADDRESS, _FLAGS = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64
_CALLS: Final = {
    "cuMemGetAllocationGranularity": (_POINTER, _POINTER, ctypes.c_int),
    "cuMemAddressReserve": (_POINTER, _SIZE, _SIZE, _ADDRESS, _FLAGS),
    "cuMemCreate": (_POINTER, _SIZE, _POINTER, _FLAGS),
    "cuMemMap": (_ADDRESS, _SIZE, _SIZE, ctypes.c_uint64, _FLAGS),
    "cuMemSetAccess": (_ADDRESS, _SIZE, _POINTER, _SIZE),
    "cuMemUnmap": (_ADDRESS, _SIZE),
    "cuMemRelease": (ctypes.c_uint64,),
    "cuMemAddressFree": (_ADDRESS, _SIZE),
    "cuCtxGetCurrent": (_POINTER,),
    "cuCtxSetCurrent": (_POINTER,),
    "cuDeviceGetAttribute": (_POINTER, ctypes.c_int, ctypes.c_int),
}
"""The calls and the types of their arguments; each returns a ``CUresult``."""


class NoVirtualMemory(RuntimeError):
    """This driver or device cannot map memory under program control."""


class _Location(ctypes.Structure):
    """``CUmemLocation``."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """``CUmemAllocationProp``; the last part is its ``allocFlags``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Driver:
    """The driver's calls, in the CUDA context of the thread that made this."""

    def __init__(self, device: int) -> None:
        """Raises NoVirtualMemory if a call is missing or the device does not support them."""
        try:
            library = ctypes.CDLL("libcuda.so.1")
            self._calls = {name: getattr(library, name) for name in _CALLS}
        except (OSError, AttributeError) as error:
            raise NoVirtualMemory(f"this NVIDIA driver lacks a call for virtual memory ({error})") from error
        for name, types in _CALLS.items():
            self._calls[name].argtypes, self._calls[name].restype = types, ctypes.c_int
        torch.cuda.current_stream(device).synchronize()  # makes the context
        supported = ctypes.c_int()
        if (
            self._calls["cuDeviceGetAttribute"](ctypes.byref(supported), SUPPORTED, device)
            or not supported.value
        ):
            raise NoVirtualMemory(f"GPU {device} does not support virtual memory management")
        self._context = ctypes.c_void_p()
        self("cuCtxGetCurrent", ctypes.byref(self._context))
        if not self._context.value:
            raise NoVirtualMemory(f"GPU {device} has no CUDA context in this thread")

    def __call__(self, name: str, *arguments: Any) -> None:
        """Raises MemoryError when the device has no memory, RuntimeError for any other error."""
        if name != "cuCtxGetCurrent":
            self._calls["cuCtxSetCurrent"](self._context)  # any thread may call
        error = self._calls[name](*arguments)
        if error == OUT_OF_MEMORY:
            raise MemoryError(f"{name}: the GPU has no memory")
        if error != SUCCESS:
            raise RuntimeError(f"{name}: CUDA error {error}")


class _Range:
    """Reserved addresses as an object that torch makes a tensor of, which keeps it alive."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class DriverBackend:
    """``region.Backend`` on one GPU."""

    def __init__(self, device: torch.device) -> None:
        """Raises NoVirtualMemory."""
        self._device = device
        number = device.index if device.index is not None else torch.cuda.current_device()
        self._call = _Driver(number)
        location = _Location(ON_DEVICE, number)
        self._properties = _Properties(type=PINNED, location=location)
        self._access = _Access(location, READ_WRITE)
        granule = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity", ctypes.byref(granule), ctypes.byref(self._properties), MINIMUM
        )
        self._granule = granule.value
        self._address = self._num_bytes = 0

    @property
    def granule(self) -> int:
        """See ``region.Backend``: 2 MiB on all GPUs so far."""
        return self._granule

    def reserve(self, num_bytes: int) -> None:
        """See ``region.Backend``."""
        address = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(address), num_bytes, 0, 0, 0)
        self._address, self._num_bytes = address.value, num_bytes

    def tensor(self, num_bytes: int) -> torch.Tensor:
        """See ``region.Backend``."""
        made = torch.as_tensor(_Range(self._address, num_bytes), device=self._device)
        assert made.data_ptr() == self._address and made.dtype == torch.uint8
        return made

    def create(self, num_bytes: int) -> int:
        """See ``region.Backend``."""
        handle = ctypes.c_uint64()
        self._call("cuMemCreate", ctypes.byref(handle), num_bytes, ctypes.byref(self._properties), 0)
        return handle.value

    def map(self, offset: int, num_bytes: int, handle: int) -> None:
        """See ``region.Backend``."""
        address = self._address + offset
        self._call("cuMemMap", address, num_bytes, 0, handle, 0)
        try:
            self._call("cuMemSetAccess", address, num_bytes, ctypes.byref(self._access), 1)
        except BaseException:
            self._call("cuMemUnmap", address, num_bytes)
            raise

    def unmap(self, offset: int, num_bytes: int) -> None:
        """See ``region.Backend``. The driver does not wait for work that uses the memory."""
        self._call("cuMemUnmap", self._address + offset, num_bytes)

    def release(self, handle: int, num_bytes: int) -> None:
        """See ``region.Backend``."""
        self._call("cuMemRelease", handle)

    def free(self) -> None:
        """See ``region.Backend``."""
        if self._address:
            self._call("cuMemAddressFree", self._address, self._num_bytes)
            self._address = 0


def refusal(device: torch.device) -> str:
    """Return why this GPU cannot back a region, in one clause; "": it can."""
    try:
        DriverBackend(device)
    except NoVirtualMemory as error:
        return str(error)
    return ""
