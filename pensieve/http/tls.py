"""TLS of the door: files that are looked at for every connection, and who a client certificate names."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pensieve.http.common.credentials import CERTIFICATE_NAMES

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. With ``client_ca`` every client has to show a certificate that one of these authorities signed."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """TLS with what is in the files now. Raises OSError, of which ``ssl.SSLError`` is one."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, self.key, _no_password)
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.client_ca)
            # A session that is taken up again shows no certificate: an authority that is gone would still let it in.
            context.options |= ssl.OP_NO_TICKET
            context.num_tickets = 0
        return context

    def stamp(self) -> tuple[int, ...]:
        """Changes when a file does. Raises OSError."""
        files = (self.cert, self.key, self.client_ca)
        return tuple(path.stat().st_mtime_ns for path in files if path is not None)


def renewing(files: TlsFiles) -> ssl.SSLContext:
    """A context whose new connections use the files as they are then. Raises OSError when they cannot be used now."""
    outer = current = files.context()
    known = files.stamp()

    def renew(connection: ssl.SSLObject, _name: str | None, _outer: ssl.SSLContext) -> None:
        nonlocal current, known
        try:
            now = files.stamp()
            if now != known:
                # Noted first: files that cannot be used are tried again when they change, and told once.
                known, current = now, files.context()
        except OSError as error:
            log.error("certificate not read again, the one in force stays: %s", error)
        connection.context = current

    # Called in every handshake, also of clients that name no server; ssl's types know it with sockets only.
    outer.sni_callback = cast(Any, renew)
    return outer


def naming(protocol: type[asyncio.Protocol]) -> type[asyncio.Protocol]:
    """uvicorn's ``protocol``, which tells the application the names in the client's certificate."""

    class Naming(protocol):  # type: ignore[misc,valid-type]
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            shown = transport.get_extra_info("ssl_object")
            names = names_in(shown.getpeercert() or {}) if shown is not None else ()
            self.app_state: dict[str, Any] = {**self.app_state, CERTIFICATE_NAMES: names}

    return Naming


def names_in(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """Alternative names of a certificate as ``getpeercert`` gives it, or its common name if it has none."""
    alternative = tuple(name for _, name in certificate.get("subjectAltName", ()))
    subject = (pair for part in certificate.get("subject", ()) for pair in part)
    return alternative or tuple(value for kind, value in subject if kind == "commonName")


def _no_password() -> str:
    # Without it OpenSSL asks the terminal.
    raise ValueError("the private key is encrypted; give one without a password")
