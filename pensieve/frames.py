"""Frames between two processes: 4-byte little-endian length, then one msgpack value of a known type.

Used between front end and engine, and between a replay and its player processes. Both ends know the types, and
nothing is ever unpickled. A peer that sends anything else, or more than ``MAX_FRAME`` bytes, is refused.
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
    """A frame is too long or is not a valid message."""


class PeerClosed(ConnectionError):
    """The peer closed the connection."""


def encode_frame(message: msgspec.Struct) -> bytes:
    """Return ``message`` as one frame. Raises FrameError when it is too long."""
    frame = bytearray(HEADER.size)
    _encoder.encode_into(message, frame, HEADER.size)
    length = len(frame) - HEADER.size
    if length > MAX_FRAME:
        raise FrameError(f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
    HEADER.pack_into(frame, 0, length)
    return bytes(frame)


def frame_length(header: bytes) -> int:
    """Return the payload length from a header. Raises FrameError when it is too long."""
    length: int = HEADER.unpack(header)[0]
    if length > MAX_FRAME:
        raise FrameError(f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
    return length


def decode(payload: bytes | memoryview, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Decode a payload. Raises FrameError if it is not of the decoder's type."""
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
        """Return all complete messages that have arrived, or [] after ``timeout`` seconds without one. Raises
        PeerClosed at end of stream, FrameError on an invalid frame."""
        deadline = time.monotonic() + timeout
        while True:
            self._read_available()
            messages = list(self._take(decoder))
            remaining_s = deadline - time.monotonic()
            if messages or remaining_s <= 0:
                return messages
            select.select([self._socket], [], [], remaining_s)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; block until the kernel has all of it. Raises PeerClosed."""
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
    """Return a strict decoder of one message type or a union of them."""
    return msgspec.msgpack.Decoder(message_type, strict=True)
