"""The pack of vLLM: what of a wheel travels, what an extension loses, pieces that ``start.sh`` puts together again."""

from __future__ import annotations

import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from support.replay.benches import load_bench

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_bench("sharing/pack", monkeypatch)


def wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    """A wheel with these members."""
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in files.items():
            archive.writestr(member, data)
    return path


def extension(*bundles: list[tuple[int, int, bytes]]) -> bytes:
    """A 64-bit ELF file with a symbol table, its names, and GPU code: kind, architecture and code of each entry."""
    gpu = b""
    for entries in bundles:
        body = b"".join(
            struct.pack("<HHIQIIHHI", kind, 257, 64, len(code), 0, 0, 0, 0, architecture) + bytes(32) + code
            for kind, architecture, code in entries
        )
        gpu += struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
    names = b"\0.nv_fatbin\0.symtab\0.strtab\0.shstrtab\0"
    parts = [(1, b".nv_fatbin", gpu, 0), (2, b".symtab", b"S" * 24, 2), (3, b".strtab", b"T" * 9, 0)]
    parts.append((3, b".shstrtab", names, 0))
    body, rows = b"", b""
    for kind, name, data, link in parts:
        rows += struct.pack(
            "<IIQQQQIIQQ", names.index(name), kind, 0, 0, 64 + len(body), len(data), link, 0, 8, 0
        )
        body += data
    head = bytearray(64)
    head[:5] = b"\x7fELF\x02"
    struct.pack_into("<Q", head, 40, 64 + len(body))
    struct.pack_into("<HHH", head, 58, 64, len(parts), len(parts) - 1)
    return bytes(head) + body + rows


def test_what_of_a_wheel_travels(bench: Any, tmp_path: Path) -> None:
    names = (
        "vllm/__init__.py", "vllm/x.pyi", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "vllm/third_party/deep_gemm/a/b.py",
        "vllm-0.data/purelib/more.py", "vllm-0.data/scripts/vllm", "vllm-0.dist-info/RECORD",
        "vllm-0.dist-info/METADATA",
    )  # fmt: skip
    made = wheel(tmp_path, "vllm-0-py3-none-any.whl", dict.fromkeys(names, b""))
    assert set(bench.members([made])) == {
        "vllm/__init__.py", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "more.py", "vllm-0.dist-info/METADATA",
    }  # fmt: skip


def test_an_extension_keeps_what_hopper_takes(bench: Any) -> None:
    text, code = bench.PTX, bench.CUBIN
    own = [(code, 80, b"eighty"), (code, 90, b"ninety"), (text, 80, b"old text"), (code, 120, b"blackwell")]
    made = extension(own, [(code, 75, b"turing"), (text, 80, b"the text"), (text, 100, b"new text")])
    result = bench.thinned(made)
    assert len(result) == len(made)
    assert b"ninety" in result and b"the text" in result
    for gone in (b"eighty", b"old text", b"blackwell", b"turing", b"new text", b"SSSS", b"TTTT"):
        assert gone in made and gone not in result
    assert bench.sections(result) == bench.sections(made)
    assert bench.thinned(b"no ELF file") == b"no ELF file"


def test_a_wheel_beside_it_does_not_travel_twice(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "typing_extensions-1-py3-none-any.whl").touch()
    carried = {name.split("==")[0] for name in bench.to_carry(tmp_path)}
    assert carried == {name.split("==")[0] for name, _ in bench.PACKAGES} - {"typing-extensions"}


@pytest.mark.parametrize(
    ("file", "fits"),
    [("a_b-1.0-cp312-cp312-manylinux1_x86_64", True), ("a_b-1.0-cp311-cp311-manylinux1_x86_64", False),
     ("a_b-1.0-cp38-abi3-manylinux1_x86_64", True), ("a_b-1.0-cp313-abi3-manylinux1_x86_64", False),
     ("a_b-1.0-py37-none-any", True), ("a_b-1.0-py2.py3-none-any", True), ("a_b-1.1-py3-none-any", False),
     ("a_b-1.0-cp312-cp312-win_amd64", False)],
)  # fmt: skip
def test_which_wheel_fits(bench: Any, tmp_path: Path, file: str, fits: bool) -> None:
    (tmp_path / f"{file}.whl").touch()
    assert (bench.find_wheel("A-b==1.0", tmp_path, "3.12") is not None) == fits


def test_start_unpacks_the_pieces(bench: Any, tmp_path: Path) -> None:
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir(), site.mkdir()
    noise = bytes(number * number % 251 for number in range(3000))
    made = wheel(tmp_path, "a-0-py3-none-any.whl", {"a/__init__.py": b"x = 1\n", "a/table": noise})
    pieces = bench.pack(bench.members([made]), wheels, 200)
    assert len(pieces) > 1 and all(path.stat().st_size <= 200 for path in pieces)
    script = (REPOSITORY / "bench/sharing/start.sh").read_text(encoding="utf-8")
    unpack = script.split("<<'UNPACK'\n")[1].split("\nUNPACK\n")[0]
    done = subprocess.run(
        [sys.executable, "-", str(wheels), str(site)],
        input=unpack,
        text=True,
        check=True,
        capture_output=True,
    )
    assert f"{len(pieces)} parts unpacked" in done.stdout
    assert (site / "a/table").read_bytes() == noise and (site / "a/__init__.py").read_bytes() == b"x = 1\n"
