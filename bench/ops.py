"""Times of the kernels on this GPU against its ceilings, and beside their peers on the same tensors.

Each time is the median replay of a CUDA graph of many calls; contenders are replayed in turn. Ceilings are measured in
the same run: a large copy, a large bf16 product, and for swapping what the wire gives.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from common.gpu_timing import measure_ceilings
from common.provenance import commit, portable
from kernel_ops import attention, flash_attention, kv_write, windows

from pensieve.kernels.kv_codec import CODES

SECTIONS = ("attention", "windows", "kv-write", "fp8", "swap")


@click.command()
@click.option(
    "--section", type=click.Choice([*SECTIONS, "all"]), default="all", help="Which operations to time."
)
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("bench/results"), help="Folder of the reports."
)
@click.option("--name", default="", help="Added to the names of the reports' files, ops_SECTION.")
@click.option(
    "--only", default="", help="Only attention steps whose name and heads, as in the table, match this."
)
@click.option(
    "--kv-dtype",
    "codecs",
    multiple=True,
    type=click.Choice(list(CODES)),
    help="Time attention over keys and values in this codec too, with several tiles, as shares of bf16's time.",
)
@click.option(
    "--fa3",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="vLLM's FlashAttention-3 extension, _vllm_fa3_C*.so or that packed as .xz; found by itself if installed.",
)
def main(section: str, out: Path, name: str, only: str, codecs: tuple[str, ...], fa3: Path | None) -> None:
    """Time the kernels on this machine's GPU; one report for each section, JSON and a table."""
    import triton

    if not torch.cuda.is_available():
        raise click.ClickException("torch sees no CUDA device here")
    ceilings = measure_ceilings()
    makers: dict[str, Callable[[], tuple[list[dict[str, Any]], str]]] = {
        "attention": lambda: attention.section(ceilings, flash_attention.find(fa3), only, codecs),
        "windows": lambda: windows.section(only),
        "kv-write": lambda: kv_write.section(ceilings),
        "fp8": _fp8,
        "swap": _swap,
    }
    out.mkdir(parents=True, exist_ok=True)
    for each in SECTIONS if section == "all" else (section,):
        rows, table = makers[each]()
        report = {
            "schema": "pensieve.ops/2", "section": each, "command": f"python {portable(sys.argv)}",
            "commit": commit(), "device": torch.cuda.get_device_name(), "torch": torch.__version__,
            "triton": triton.__version__, "copy_tb_per_s": round(ceilings.copy_bytes_per_s / 1e12, 2),
            "matrix_tflop_per_s": round(ceilings.matrix_flops / 1e12), "rows": rows,
        }  # fmt: skip
        page = (
            f"`{report['command']}`\n\n{report['device']}, torch {report['torch']}, Triton {report['triton']}, commit "
            f"{report['commit'] or 'unknown'}; copy {report['copy_tb_per_s']} TB/s, bf16 product "
            f"{report['matrix_tflop_per_s']} TFLOP/s.\n\n{table}"
        )
        file = out / "_".join(filter(None, ("ops", each.replace("-", "_"), name)))
        file.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        file.with_suffix(".md").write_text(page)
        click.echo(page)


def _fp8() -> tuple[list[dict[str, Any]], str]:
    from kernel_ops import fp8  # needs the engine's dependencies, too

    return fp8.section()


def _swap() -> tuple[list[dict[str, Any]], str]:
    from kernel_ops import swap  # needs the engine's dependencies, the others torch and Triton only

    return swap.section()


if __name__ == "__main__":
    main()
