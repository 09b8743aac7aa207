"""Writes the Python stubs of ``pensieve.v1``: ``python proto/generate.py [OUTPUT_ROOT]`` (default: the repository).

Needs the generator of ``requirements.txt`` in ``.venv/protoc`` (``make setup`` puts it there).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GENERATOR = Path(sys.prefix) / "protoc"
SOURCE = "pensieve/v1/pensieve.proto"


def generate(output_root: Path) -> None:
    """Write ``pensieve/v1/pensieve_pb2{.py,.pyi,_grpc.py}`` below ``output_root``. Raises on any failure."""
    if not (GENERATOR / "grpc_tools").is_dir():
        raise FileNotFoundError(f"{GENERATOR} has no grpc_tools: run `make setup`")
    outputs = [f"--{kind}_out={output_root}" for kind in ("python", "grpc_python", "pyi")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}", *outputs, SOURCE],
        check=True,
        env=os.environ | {"PYTHONPATH": str(GENERATOR)},
    )


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
