"""A name server of a test: it knows the addresses of a few names, and that there are no others."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator, Mapping


def _answer(question: bytes, known: Mapping[str, str]) -> bytes:
    """RFC 1035: the header with its counts, the question again, and an address if that is what was asked for."""
    labels, at = [], 12
    while size := question[at]:
        labels.append(question[at + 1 : at + 1 + size].decode())
        at += 1 + size
    asked = question[12 : at + 5]
    address = known.get(".".join(labels).lower())
    (kind,) = struct.unpack(">H", question[at + 1 : at + 3])
    code = 0x8180 if address is not None else 0x8183  # NXDOMAIN
    found = b""
    if address is not None and kind == 1:
        found = struct.pack(">HHHIH", 0xC00C, 1, 1, 1, 4) + socket.inet_aton(address)
    return question[:2] + struct.pack(">HHHHH", code, 1, bool(found), 0, 0) + asked + found


@contextlib.contextmanager
def name_server(known: Mapping[str, str]) -> Iterator[str]:
    """Its HOST:PORT. It answers until the end."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))

        def serve() -> None:
            while True:
                question, asker = listener.recvfrom(4096)
                if not question:
                    return
                listener.sendto(_answer(question, known), asker)

        thread = threading.Thread(target=serve, name="name server")
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
                last.sendto(b"", listener.getsockname())
            thread.join()
