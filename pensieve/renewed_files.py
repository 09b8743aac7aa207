"""Files that are read again while a server runs: how a change is noticed, and the certificates of a port."""

from __future__ import annotations

import logging
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


def file_stamp(path: Path) -> tuple[int, int, int]:
    """Return numbers that change with a file's content. Raises OSError, also for a pipe, which would be waited for."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is not a regular file")
    return status.st_mtime_ns, status.st_size, status.st_ino


def no_password() -> str:
    """Stand in for OpenSSL's question on the terminal. Always raises ValueError."""
    raise ValueError("the private key is encrypted; give one without a password")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. With ``client_ca`` every client must present a certificate signed by one of its authorities."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Return a context from the files' present content. Raises OSError that names the file."""
        self.stamp()
        for path in self._paths:
            path.open("rb").close()  # OpenSSL would not name the file
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key, no_password)
        except (OSError, ValueError) as error:
            both = f"{self.cert} and {self.key} are not a PEM certificate and its key"
            raise OSError(f"--tls-cert, --tls-key: {both} ({error})") from error
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self.client_ca)
            except OSError as error:
                raise OSError(
                    f"--tls-client-ca: {self.client_ca} has no PEM certificates ({error})"
                ) from error
            # A resumed session presents no certificate, so it would outlive the removal of its authority.
            context.options |= ssl.OP_NO_TICKET
            context.num_tickets = 0
        return context

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        return tuple(map(file_stamp, self._paths))

    @property
    def _paths(self) -> tuple[Path, ...]:
        return (self.cert, self.key) if self.client_ca is None else (self.cert, self.key, self.client_ca)


class RenewedTls(Generic[T]):
    """A value made of certificate files, made again for the next connection after they have changed."""

    def __init__(self, files: TlsFiles, make: Callable[[], T]) -> None:
        """Raises OSError when the files cannot be used now. ``make`` raises OSError, too."""
        self._files = files
        self._make = make
        self._stamp = files.stamp()
        self._reported = ""
        self.current = make()

    def renew(self) -> bool:
        """Return whether ``current`` has changed. It stays as it is while the files cannot be used."""
        try:
            stamp = self._files.stamp()
            if stamp == self._stamp:
                return False
            made = self._make()
            if self._files.stamp() != stamp:
                return False  # being written: perhaps one file is new and another is not
        except OSError as error:
            # Tried again at each connection, since the cause may lie elsewhere, as with a lack of descriptors.
            if str(error) != self._reported:
                self._reported = str(error)
                log.error("the certificate could not be read again; the present one stays in use: %s", error)
            return False
        self._stamp, self._reported, self.current = stamp, "", made
        return True
