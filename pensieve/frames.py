"""Frames between two processes of ours: 4-byte little-endian length, then one msgpack value of a known type.

The front end talks to its engine this way, and a replay to its player processes. Both ends know the type and nothing is
ever unpickled: a peer that sends anything else, or more than ``MAX_FRAME`` bytes, is refused, not interpreted.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import Any, Final, TypeVar

import msgspec

MAX_FRAME: Final = 64 * 1024 * 1024
HEADER: Final = struct.Struct("<I")
_READ_SIZE: Final = 1 << 18
_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")


class FrameError(ValueError):
    """A frame is longer than ``MAX_FRAME``, or is not what the protocol says."""


class PeerClosed(ConnectionError):
    """The other end is gone."""


def encode_frame(message: msgspec.Struct) -> bytes:
    """``message`` as one frame. Raises FrameError when it is too long."""
    frame = bytearray(HEADER.size)
    _encoder.encode_into(message, frame, HEADER.size)
    length = len(frame) - HEADER.size
    if length > MAX_FRAME:
        raise FrameError(f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
    HEADER.pack_into(frame, 0, length)
    return bytes(frame)


def frame_length(header: bytes) -> int:
    """Length of the payload that follows ``header``. Raises FrameError, before anything is read, when too long."""
    length: int = HEADER.unpack(header)[0]
    if length > MAX_FRAME:
        raise FrameError(f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
    return length


def decode(payload: bytes | memoryview, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """The message in a frame. Raises FrameError on anything but the decoder's type."""
    try:
        return decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise FrameError(f"undecodable frame: {error}") from error


class FrameSocket:
    """Blocking end of a stream socket, for a process without an event loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._buffer = bytearray()

    def receive(self, decoder: msgspec.msgpack.Decoder[T], timeout: float) -> list[T]:
        """Every whole message that has arrived; waits up to ``timeout`` seconds for the first.

        Returns [] when none came. Raises PeerClosed at end of stream, FrameError on a bad frame.
        """
        deadline = time.monotonic() + timeout
        while True:
            self._read_available()
            messages = list(self._take(decoder))
            left = deadline - time.monotonic()
            if messages or left <= 0:
                return messages
            select.select([self._socket], [], [], left)

    def send(self, message: msgspec.Struct) -> None:
        """Blocks until the kernel has all of it. Raises PeerClosed."""
        try:
            self._socket.sendall(encode_frame(message))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PeerClosed("the other end is gone") from error

    def close(self) -> None:
        self._socket.close()

    def _read_available(self) -> None:
        while select.select([self._socket], [], [], 0)[0]:
            try:
                data = self._socket.recv(_READ_SIZE)
            except ConnectionResetError as error:
                raise PeerClosed("the other end is gone") from error
            if not data:
                raise PeerClosed("the other end is gone")
            self._buffer += data

    def _take(self, decoder: msgspec.msgpack.Decoder[T]) -> list[T]:
        messages: list[T] = []
        offset = 0
        while len(self._buffer) - offset >= HEADER.size:
            start = offset + HEADER.size
            end = start + frame_length(bytes(self._buffer[offset:start]))
            if len(self._buffer) < end:
                break
            messages.append(decode(bytes(self._buffer[start:end]), decoder))
            offset = end
        del self._buffer[:offset]
        return messages


def decoder_for(message_type: Any) -> msgspec.msgpack.Decoder[Any]:
    """A strict decoder of one message type or union of them."""
    return msgspec.msgpack.Decoder(message_type, strict=True)
