"""What is handed out: a source distribution that is the whole repository, and a wheel that is the package alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import pensieve
from support.sources import LINKS, ROOT, files, python_files

NAME = f"pensieve-{pensieve.__version__}"
SETUPTOOLS_WRITES = {"PKG-INFO", "setup.cfg", "pensieve.egg-info"}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from a copy of the repository's files, with some of a working folder's litter beside them."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("sdist")
    for path in files():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / path).is_symlink():
            (source / path).symlink_to(os.readlink(ROOT / path))
        else:
            (source / path).write_bytes((ROOT / path).read_bytes())
            (source / path).chmod((ROOT / path).stat().st_mode)
    for litter in (
        "tests/__pycache__/x.cpython-311.pyc",
        "kernels/__pycache__/y.pyc",
        "build/lib/z.py",
        ".venv/a.py",
    ):
        (source / litter).parent.mkdir(parents=True, exist_ok=True)
        (source / litter).write_bytes(b"")
    code = f"import setuptools.build_meta as backend; backend.build_sdist({str(out)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, timeout=100, capture_output=True)
    return out / f"{NAME}.tar.gz"


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from the source distribution, as an installer would."""
    out = tmp_path_factory.mktemp("wheel")
    command = ["pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), str(sdist)]
    subprocess.run([sys.executable, "-m", *command], check=True, timeout=100)
    (wheel,) = out.glob("pensieve-*.whl")
    return wheel


def test_the_source_distribution_holds_the_repository_and_nothing_else(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = {Path(member.name).relative_to(NAME): member for member in archive if not member.isdir()}
    extra = {path for path in set(members) - set(files()) if path.parts[0] not in SETUPTOOLS_WRITES}
    assert (set(files()) - set(members), extra) == (set(), set())
    assert {str(path): one.linkname for path, one in members.items() if one.issym()} == {
        link: f"../{folder}" for link, folder in LINKS.items()
    }
    assert members[Path(".ci/run")].mode & 0o100


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    info = f"{NAME}.dist-info"
    assert {name.split("/")[0] for name in names} == {"pensieve", info}
    expected = {
        f"{link}/{path.relative_to(folder)}"
        for link, folder in LINKS.items()
        for path in python_files(folder)
    } | {str(path) for path in python_files("pensieve")}
    expected |= {"pensieve/py.typed", "pensieve/demo/conversations.json"}
    expected |= {"pensieve/v1/pensieve_pb2.py", "pensieve/v1/pensieve_pb2.pyi"}
    data = {
        ("pensieve", "demo", "model"),
        ("pensieve", "replay", "presentation"),
        ("pensieve", "server", "page"),
    }
    expected |= {str(path) for path in files() if path.parts[:3] in data and path.suffix != ".md"}
    ours = {name for name in names if not name.startswith((f"{info}/", "pensieve/v1/"))}
    assert expected - set(names) == set()
    assert ours - expected == set(), "documents"
    assert f"{info}/licenses/LICENSE" in names


def test_the_demo_works_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['pensieve', 'demo', '--help']\n"
        "import pensieve.cli.main, pensieve.demo, pensieve.demo.conversations\n"
        f"assert pensieve.__file__.startswith({str(tmp_path)!r})\n"
        "assert pensieve.demo.conversations.material().lives\n"
        "assert (pensieve.demo.MODEL_DIR / 'model.safetensors').is_file()\n"
        "pensieve.cli.main.main()"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "First act" in result.stdout, result.stderr
