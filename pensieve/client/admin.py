"""Calls of AdminService, for commands that speak to a server's admin port."""

from __future__ import annotations

from typing import Any, Final

import grpc

from pensieve import rpc_status
from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc

SIZES: Final = ("held", "wanted", "floor", "ceiling")
_CHANNEL_OPTIONS: Final = (("grpc.enable_retries", 0), ("grpc.enable_http_proxy", 0))


def device_memory(address: str, size: str | None, *, api_key: str, timeout_s: float) -> dict[str, int]:
    """Return the bytes of a server's device tier by the names of ``SIZES``.

    ``size``: set the wanted size first, written as for ``--device-cache``; None: only ask. ``api_key`` may be "".
    Raises PensieveError.
    """
    metadata = [("authorization", f"Bearer {api_key}")] if api_key else None
    with grpc.insecure_channel(address, options=_CHANNEL_OPTIONS) as channel:
        stub: Any = pensieve_pb2_grpc.AdminServiceStub(channel)  # generated code has no annotations
        try:
            if size is None:
                answer = stub.GetMemory(pb.GetMemoryRequest(), metadata=metadata, timeout=timeout_s)
            else:
                answer = stub.SetMemory(
                    pb.SetMemoryRequest(device=size), metadata=metadata, timeout=timeout_s
                )
        except grpc.RpcError as error:
            raise rpc_status.from_rpc_error(error) from error
    return {name: int(getattr(answer.device, name)) for name in SIZES}
