"""A certificate that a client shows to a server which wants one."""

from __future__ import annotations

import functools
import ssl
from pathlib import Path

import grpc

from pensieve.renewed_files import file_stamp, no_password


def identity_credentials(path: Path) -> grpc.ChannelCredentials:
    """Return TLS credentials that show the certificate of ``path``: a PEM file with its chain and its private key.

    The server is checked against the system's root certificates, or those of ``GRPC_DEFAULT_SSL_ROOTS_FILE_PATH``.
    A renewed file counts for the clients made after. Raises OSError (``ssl.SSLError`` is one) or ValueError if the
    file cannot be used.
    """
    return _credentials(path, file_stamp(path))


@functools.lru_cache(maxsize=2)
def _credentials(path: Path, stamp: tuple[int, int, int]) -> grpc.ChannelCredentials:
    """One object for each content: gRPC shares a connection only between channels with the same object."""
    # gRPC names no fault of a certificate or a key, it only fails to connect.
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(path, password=no_password)
    pem = path.read_bytes()
    return grpc.ssl_channel_credentials(None, pem, pem)
