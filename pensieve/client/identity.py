"""A certificate that a client shows to a server which wants one."""

from __future__ import annotations

import functools
import ssl
from pathlib import Path

import grpc

from pensieve.renewed_files import RenewedTls, TlsFiles, no_password


def identity_credentials(path: Path) -> grpc.ChannelCredentials:
    """Return TLS credentials that show the certificate of ``path``: a PEM file with its chain and its private key.

    The server is checked against the system's root certificates, or those of ``GRPC_DEFAULT_SSL_ROOTS_FILE_PATH``.
    A renewed file counts for the clients made after; while it cannot be used, the one of before does. Raises OSError
    if the file has never been of use.
    """
    identity = _identity(path)
    identity.renew()
    return identity.current


@functools.cache
def _identity(path: Path) -> RenewedTls[grpc.ChannelCredentials]:
    """One object for each content: gRPC shares a connection only between channels with the same object."""

    def make() -> grpc.ChannelCredentials:
        try:  # gRPC names no fault of a certificate or a key, it only fails to connect
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(path, password=no_password)
        except (OSError, ValueError) as error:
            raise OSError(
                f"{path} is not a PEM file with a certificate and its private key ({error})"
            ) from error
        pem = path.read_bytes()
        return grpc.ssl_channel_credentials(None, pem, pem)

    return RenewedTls(TlsFiles(path, path), make)
