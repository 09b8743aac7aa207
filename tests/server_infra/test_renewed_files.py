"""Keys and certificates that are replaced while a server runs, in each way that files are replaced."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import ssl
from pathlib import Path

import pytest

from pensieve.options.values import existing_file
from pensieve.renewed_files import RenewedTls, TlsFiles
from pensieve.server.rpc.auth import Authenticator
from pensieve.server.rpc.grpc_server import BindError, tls_credentials
from support.service.certificates import authority

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")
KEYS = f'[[key]]\nid = "one"\nsha256 = "{"0" * 64}"\ntenant = '


@pytest.fixture
def pair(tmp_path: Path) -> TlsFiles:
    cert = authority(tmp_path, "own")
    return TlsFiles(cert, cert.with_suffix(".key"))


def other(pair: TlsFiles) -> TlsFiles:
    cert = authority(pair.cert.parent, "other")
    return TlsFiles(cert, cert.with_suffix(".key"))


def contents(files: TlsFiles) -> RenewedTls[bytes]:
    """Holds the certificate's text, for the next connection."""

    def make() -> bytes:
        files.context()
        return files.cert.read_bytes()

    return RenewedTls(files, make)


def test_a_link_to_a_folder_may_be_swapped(pair: TlsFiles, tmp_path: Path) -> None:
    """So Kubernetes renews what it mounts: the files of before are gone then."""

    def version(name: str, files: TlsFiles, tenant: str) -> None:
        (tmp_path / name).mkdir()
        shutil.copy(files.cert, tmp_path / name / "tls.crt")
        shutil.copy(files.key, tmp_path / name / "tls.key")
        (tmp_path / name / "keys.toml").write_text(f'{KEYS}"{tenant}"\n')
        (tmp_path / "new").symlink_to(name)
        (tmp_path / "new").rename(tmp_path / "data")

    version("first", pair, "acme")
    for name in ("tls.crt", "tls.key", "keys.toml"):
        (tmp_path / name).symlink_to(f"data/{name}")
    tls = contents(
        TlsFiles(existing_file(str(tmp_path / "tls.crt")), existing_file(str(tmp_path / "tls.key")))
    )
    keys = Authenticator(existing_file(str(tmp_path / "keys.toml")))
    renewed = other(pair)
    version("second", renewed, "other")
    shutil.rmtree(tmp_path / "first")
    assert tls.renew() and tls.current == renewed.cert.read_bytes()
    keys.reload()
    assert keys.tenants.tenant_names == {"other"}


def test_files_that_are_no_pair_yet_change_nothing(pair: TlsFiles, caplog: pytest.LogCaptureFixture) -> None:
    tls, renewed, before = contents(pair), other(pair), pair.cert.read_bytes()
    for content in (renewed.cert.read_bytes()[:200], b"", renewed.cert.read_bytes()):
        pair.cert.write_bytes(content)
        assert not tls.renew() and not tls.renew() and tls.current == before
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(told) == len(set(told)) and all(str(pair.cert) in line for line in told)
    shutil.copy(renewed.key, pair.key)
    assert tls.renew() and tls.current == renewed.cert.read_bytes()


def test_a_renewal_without_descriptors_is_made_up_for(
    pair: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls, renewed = contents(pair), other(pair)
    shutil.copy(renewed.cert, pair.cert)
    shutil.copy(renewed.key, pair.key)

    def without(_: TlsFiles) -> ssl.SSLContext:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(TlsFiles, "context", without)
        assert not tls.renew()
    assert tls.renew() and tls.current == renewed.cert.read_bytes()


def test_a_pipe_is_not_waited_for(pair: TlsFiles, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'{KEYS}"acme"\n')
    tls, authenticator = contents(pair), Authenticator(keys)
    for path in (pair.key, keys):
        path.unlink()
        os.mkfifo(path)
    assert not tls.renew()
    authenticator.reload(always=True)
    assert authenticator.tenants.tenant_names == {"acme"}
    with pytest.raises(ValueError, match=f"{keys} is not a regular file"):
        existing_file(str(keys))


def test_authorities_that_are_none_are_refused(pair: TlsFiles, tmp_path: Path) -> None:
    """With an empty file gRPC would refuse every client, and say nothing."""
    for content in (b"", b"junk"):
        (tmp_path / "ca.crt").write_bytes(content)
        with pytest.raises(
            BindError, match=f"--tls-client-ca: {tmp_path / 'ca.crt'} has no PEM certificates"
        ):
            tls_credentials(pair.cert, pair.key, tmp_path / "ca.crt")
