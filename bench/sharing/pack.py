"""Makes what ``start.sh`` unpacks: vLLM and what it imports, as pieces ``vllm-part-N.tar`` of one xz archive.

    python bench/sharing/pack.py WHEELS

The tree is for PYTHONPATH on a machine with a Hopper GPU whose Python has torch, Triton and transformers but can
install nothing. Of vLLM's dependencies it has those that the server imports (``PACKAGES``); a package whose wheel lies
in WHEELS comes from there. Left out is what a dense model in bfloat16 does not touch: FlashAttention 2, the kernels for
mixtures of experts, other vendors' headers. In the extensions, code for other GPUs and symbols are overwritten with
zeros, in place: nothing moves, and zeros cost nothing.
"""

from __future__ import annotations

import io
import lzma
import os
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import cast

import click

PACKAGES = (
    ("vllm==0.26.0", "the server itself"),
    # The HTTP door, imported at module level.
    ("fastapi==0.136.3", "vLLM wants less than 0.137"),
    ("starlette==1.10.0", "of fastapi"),
    ("uvicorn==0.54.0", "runs the application"),
    ("anyio==4.16.0", "of starlette, openai and watchfiles"),
    ("h11==0.16.0", "of uvicorn"),
    ("idna==3.20", "of anyio"),
    ("click==8.5.1", "of uvicorn"),
    ("pydantic==2.14.3", "requests, answers and vLLM's configuration"),
    ("pydantic-core==2.50.4", "the one version that pydantic takes"),
    ("annotated-types==0.8.0", "of pydantic"),
    ("annotated-doc==0.0.7", "of fastapi"),
    ("typing-inspection==0.4.5", "of pydantic and fastapi"),
    ("typing-extensions==4.16.0", "pydantic and anyio want a newer one than torch does"),
    ("python-multipart==0.0.34", "fastapi refuses routes with forms without it"),
    ("prometheus-fastapi-instrumentator==8.1.0", "/metrics"),
    ("watchfiles==1.3.0", "certificates that change"),
    ("model-hosting-container-standards==0.1.16", "routes of SageMaker, which the server always has"),
    ("jmespath==1.1.0", "of model-hosting-container-standards"),
    ("openai==2.54.0", "types of the API; 3 needs another HTTP client"),
    ("jiter==0.19.0", "of openai"),
    ("sniffio==1.3.1", "of openai"),
    ("distro==1.9.0", "of openai"),
    ("openai-harmony==0.0.8", "types of the Responses API"),
    ("partial-json-parser==0.2.1.1.post7", "parsers of tool calls"),
    ("ijson==3.6.0", "parsers of tool calls"),
    ("pybase64==1.5.1", "media and token ids in requests"),
    # Between the server and the engine.
    ("msgspec==0.22.0", "messages"),
    ("pyzmq==27.3.0", "sockets"),
    ("cbor2==6.3.0", "hashes of the prefix cache"),
    ("cachetools==8.0.1", "caches of processors"),
    ("setproctitle==1.3.8", "names of processes"),
    # Named in annotations of classes, so that the import of the engine needs them.
    ("llguidance==1.7.6", "grammars"),
    ("xgrammar==0.2.8", "grammars"),
    ("apache-tvm-ffi==0.1.11", "of xgrammar"),
    # Small ones for paths that an option or a checkpoint opens.
    ("compressed-tensors==0.17.0", "looked at for any quantization"),
    ("loguru==0.7.3", "of compressed-tensors"),
    ("blake3==1.0.11", "hashes of images"),
    ("lm-format-enforcer==0.11.3", "grammars"),
    ("interegular==0.3.3", "of lm-format-enforcer"),
    ("depyf==0.20.0", "dumps of compiled code"),
    ("astor==0.8.1", "of depyf"),
    ("dill==0.4.1", "of depyf"),
    ("python-json-logger==4.2.0", "logs as JSON"),
)
"""What travels, and why. Packages that the machine has are missing on purpose."""

DROPPED = (
    ("vllm/vllm_flash_attn/_vllm_fa2_C.*", "FlashAttention 2: Hopper takes 3"),
    ("vllm/_moe_C_*", "mixtures of experts"),
    ("vllm/_qutlass_C.*", "4-bit floats of Blackwell"),
    ("vllm/_flashmla_*", "latent attention of DeepSeek"),
    ("vllm/_rust_tool_parser.*", "a second parser of tool calls"),
    ("vllm/vllm-rs", "a second HTTP door"),
    ("vllm/third_party/deep_gemm/*", "8-bit floats"),
    ("vllm/third_party/fmha_sm100/*", "Blackwell"),
    ("vllm/third_party/tml_fa4/*", "Blackwell"),
    ("tvm_ffi/3rdparty/*", "sources"),
    ("tvm_ffi/include/*", "sources"),
    ("tvm_ffi/src/*", "sources"),
    ("zmq/tests/*", "tests"),
    ("*.pyi", "types"),
    ("*.cpp", "sources"),
    ("*.h", "sources"),
    ("*.jpg", "a picture"),
    ("*.dist-info/RECORD", "pip uninstalls nothing here"),
)
"""Patterns of paths in a wheel (``*`` crosses folders) that do not travel, and why."""

PLATFORMS = tuple(
    f"manylinux{version}_x86_64"
    for version in (
        "_2_35", "_2_34", "_2_31", "_2_28", "_2_27", "_2_26", "_2_24", "_2_17", "2014", "_2_12", "2010", "_2_5", "1"
    )
)  # fmt: skip
HOPPER = 90
PIECE = 55_000_000
XZ = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20}]
"""The window spans the kernels of FlashAttention 3, which are alike; unpacking takes as much memory."""

FATBIN, PTX, CUBIN = 0xBA55ED50, 1, 2
"""First word of a bundle of GPU code, and the kinds of its entries: a text to compile, and code."""
SYMBOL_TABLE = 2


def wheel_name(package: str) -> str:
    """How a wheel's file name spells a package or a version."""
    return re.sub(r"[-_.]+", "_", package).lower()


def _runs_on(tag: str, abi: str, python: str) -> bool:
    """Whether CPython ``python`` takes a wheel of this interpreter tag and ABI."""
    minor = int(python.split(".")[1])
    if tag.startswith("py"):
        return tag.startswith("py3")
    return tag == f"cp3{minor}" or (abi == "abi3" and tag.startswith("cp3") and int(tag[3:]) <= minor)


def find_wheel(requirement: str, folder: Path, python: str) -> Path | None:
    """The wheel of ``name==version`` in ``folder`` that fits CPython ``python``, such as 3.12."""
    name, version = requirement.split("==")
    for path in sorted(folder.glob("*.whl")):
        found, number, *_, interpreter, abi, platform = path.stem.split("-")
        python_fits = any(_runs_on(tag, abi, python) for tag in interpreter.split("."))
        fits = python_fits and (platform == "any" or "x86_64" in platform)
        if fits and (wheel_name(found), number) == (wheel_name(name), version):
            return path
    return None


def fetch(requirements: Sequence[str], cache: Path, python: str) -> list[Path]:
    """Their wheels, of which those that ``cache`` lacks are downloaded to it."""
    cache.mkdir(parents=True, exist_ok=True)
    missing = [name for name in requirements if find_wheel(name, cache, python) is None]
    if missing:
        click.echo(f"downloading {', '.join(missing)}")
        platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
            "--implementation", "cp", "--python-version", python, *platforms, "--dest", str(cache), *missing,
        ]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise click.ClickException(f"pip does not download:\n{done.stdout[-2000:]}")
    wheels = []
    for requirement in requirements:
        wheel = find_wheel(requirement, cache, python)
        if wheel is None:
            raise click.ClickException(f"pip left no wheel of {requirement} in {cache}")
        wheels.append(wheel)
    return wheels


def to_carry(wheels: Path) -> list[str]:
    """The requirements of ``PACKAGES``, less those of which any version's wheel lies in the folder ``wheels``."""
    beside = {wheel_name(path.name.split("-")[0]) for path in wheels.glob("*.whl")}
    return [name for name, _ in PACKAGES if wheel_name(name.split("==")[0]) not in beside]


def is_dropped(path: str) -> bool:
    return any(fnmatchcase(path, pattern) for pattern, _ in DROPPED)


def installed_path(path: str) -> str | None:
    """Where a member of a wheel goes below PYTHONPATH; None where that is no place for it, as for programs."""
    top, _, rest = path.partition("/")
    if not top.endswith(".data"):
        return path
    kind, _, inner = rest.partition("/")
    return inner if kind in ("purelib", "platlib") else None


def members(wheels: Iterable[Path]) -> dict[str, tuple[Path, str]]:
    """Path in the tree → wheel and path there, without what is dropped. Like stands by like, for the compression."""
    found: dict[str, tuple[Path, str]] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                path = installed_path(name)
                if path and not name.endswith("/") and not is_dropped(path):
                    if path in found:
                        raise click.ClickException(f"{path} is in {found[path][0].name} and in {wheel.name}")
                    found[path] = wheel, name
    return dict(sorted(found.items(), key=lambda item: (Path(item[0]).suffix, item[0])))


def sections(code: bytes | bytearray) -> list[tuple[str, int, int, int, int]]:
    """Name, kind, offset, size and linked section of each section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", code, 40)
    size, count, names = struct.unpack_from("<HHH", code, 58)
    rows = [struct.unpack_from("<IIQQQQII", code, table + size * number) for number in range(count)]
    named = []
    for row in rows:
        begin = rows[names][4] + row[0]
        name = bytes(code[begin : code.index(0, begin)]).decode()
        named.append((name, row[1], row[4], row[5], row[6]))
    return named


def bundles(code: bytes | bytearray, begin: int, end: int) -> Iterator[list[tuple[int, int, int, int]]]:
    """The bundles of GPU code between two offsets, each as kind, architecture, offset and size of its entries."""
    while begin + 16 <= end:
        magic, _, header, size = struct.unpack_from("<IHHQ", code, begin)
        if magic != FATBIN:
            begin += 8
            continue
        at, begin = begin + header, begin + header + size
        entries = []
        while at < begin:
            kind, _, head, length = struct.unpack_from("<HHIQ", code, at)
            (architecture,) = struct.unpack_from("<I", code, at + 28)
            entries.append((kind, architecture, at + head, length))
            at += head + length
        yield entries


def unused(entries: Sequence[tuple[int, int, int, int]]) -> list[tuple[int, int]]:
    """Offset and size of the entries of a bundle that Hopper does not take: it takes its own code, else it compiles."""
    own = [entry for entry in entries if entry[:2] == (CUBIN, HOPPER)]
    kept = own or [entry for entry in entries if entry[0] == PTX and entry[1] <= HOPPER]
    return [(at, size) for *_, at, size in set(entries) - set(kept)]


def thinned(code: bytes) -> bytes:
    """An extension, of the same length, with zeros for symbols that only debuggers read and for other GPUs' code."""
    if code[:5] != b"\x7fELF\x02":
        return code
    result = bytearray(code)
    table = sections(code)
    names = {name for name, *_ in table}
    for name, kind, offset, size, link in table:
        if kind == SYMBOL_TABLE and ".shstrtab" in names and table[link][0] == ".strtab":
            result[offset : offset + size] = bytes(size)
            _, _, offset, size, _ = table[link]
            result[offset : offset + size] = bytes(size)
        if name == ".nv_fatbin":
            for entries in bundles(code, offset, offset + size):
                for at, length in unused(entries):
                    result[at : at + length] = bytes(length)
    return bytes(result)


class Pieces(io.RawIOBase):
    """A file that is written to pieces of at most ``limit`` bytes, ``vllm-part-1.tar`` and on."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.paths: list[Path] = []
        self.room = 0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]  # bytes are all that is given
        rest = memoryview(data)
        while rest:
            if not self.room:
                if len(self.paths) == 9:
                    raise click.ClickException("more than nine pieces, which sort wrongly: make them larger")
                self.paths.append(self.folder / f"vllm-part-{len(self.paths) + 1}.tar")
                self.room = self.limit
            now = rest[: self.room]
            with self.paths[-1].open("ab") as piece:
                piece.write(now)
            self.room -= len(now)
            rest = rest[len(now) :]
        return len(data)


def pack(tree: dict[str, tuple[Path, str]], folder: Path, piece: int) -> list[Path]:
    """Writes the archive of ``tree`` (see ``members``) to ``folder``, and returns its pieces."""
    pieces = Pieces(folder, piece)
    open_wheels: dict[Path, zipfile.ZipFile] = {}
    begun = said = time.monotonic()
    done = 0
    with (
        lzma.LZMAFile(cast("io.BufferedIOBase", pieces), "wb", filters=XZ) as compressed,
        tarfile.open(fileobj=compressed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for number, (path, (wheel, name)) in enumerate(tree.items(), start=1):
            if wheel not in open_wheels:
                open_wheels[wheel] = zipfile.ZipFile(wheel)
            data = open_wheels[wheel].read(name)
            if ".so" in Path(path).suffixes:
                data = thinned(data)
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(data), 0o644
            archive.addfile(member, io.BytesIO(data))
            done += len(data)
            if time.monotonic() - said > 10 or len(data) > 20_000_000:
                said = time.monotonic()
                click.echo(
                    f"{said - begun:4.0f} s: {number} of {len(tree)} files, {done / 1e6:.0f} MB: {path}"
                )
    for opened in open_wheels.values():
        opened.close()
    return pieces.paths


@click.command()
@click.argument("wheels", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/vllm"),
    show_default=True,
    help="Keeps what is downloaded; what lies there is not downloaded again.",
)
@click.option("--python", default="3.12", show_default=True, help="Version of Python on the machine.")
@click.option("--piece", type=click.IntRange(min=1), default=PIECE, show_default=True,
              help="Bytes of a piece at most.")  # fmt: skip
def main(wheels: Path, cache: Path, python: str, piece: int) -> None:
    """Write vllm-part-1.tar and on to WHEELS, in place of those that are there.

    Takes two minutes on an idle core and downloads 330 MB. A package whose wheel lies in WHEELS is left out.
    """
    os.nice(10)
    wheels.mkdir(parents=True, exist_ok=True)
    tree = members(fetch(to_carry(wheels), cache, python))
    click.echo(f"packing {len(tree)} files")
    with tempfile.TemporaryDirectory(prefix=".vllm-", dir=wheels) as folder:
        made = pack(tree, Path(folder), piece)
        for old in wheels.glob("vllm-part-*.tar"):
            old.unlink()
        pieces = [path.replace(wheels / path.name) for path in made]
    for path in pieces:
        click.echo(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    total = sum(path.stat().st_size for path in wheels.iterdir() if path.is_file())
    click.echo(f"{wheels}: {total / (1 << 20):.1f} MiB in all")


if __name__ == "__main__":
    main()
