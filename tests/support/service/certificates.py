"""Certificates made with openssl, good for a day."""

from __future__ import annotations

import subprocess
from pathlib import Path

CURVE = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


def authority(folder: Path, name: str) -> Path:
    """The certificate of a new authority; its key lies beside it."""
    openssl(
        "req", "-x509", *CURVE, "-subj", f"/CN={name}", "-addext", "keyUsage=critical,keyCertSign,cRLSign",
        "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.crt",
    )  # fmt: skip
    return folder / f"{name}.crt"


def signed(folder: Path, ca: Path, name: str, subject: str, alternative: str = "") -> tuple[Path, Path]:
    """Certificate and key of ``subject``, signed by ``ca``."""
    key, request, cert = (folder / f"{name}.{end}" for end in ("key", "csr", "crt"))
    openssl("req", *CURVE, "-subj", subject, "-keyout", key, "-out", request)
    extensions = folder / f"{name}.ext"
    names = f"subjectAltName={alternative}" if alternative else "basicConstraints=CA:FALSE"
    extensions.write_text(f"{names}\nauthorityKeyIdentifier=keyid\n")  # Python 3.13 asks for it
    openssl(
        "x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca.with_suffix(".key"), "-CAcreateserial", "-days", 1,
        "-extfile", extensions, "-out", cert,
    )  # fmt: skip
    return cert, key
