"""Contiguous KV by virtual memory beside pages: the figures of vAttention (ASPLOS '25) for a 13B model, 10 KV heads.

    python bench/vmm/compare.py --fa3 FILE        # on one GPU, about two minutes
    python bench/vmm/compare.py --small --out build/vmm

The last table says whether a contiguous layout passes the gate. ``--small`` shows on a CPU that all of it runs.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import torch
from rich.console import Console
from rich.progress import track

sys.path.append(str(Path(__file__).resolve().parents[1]))  # bench/, which is no package

from common.provenance import commit, driver_version, gpu_name, portable, table, write_report
from contiguous import LLAMA, TINY, Setting, Shape, arena, arena_bytes, attention_ms, captured, tidy
from kernel_ops.flash_attention import find

from pensieve.engine.kv.virtual.region import Region

PAGED: Final = ("ours", "FA3 paged")
SHARE: Final = 16
"""Pages in a large handle, and in one piece of swapped data."""
SWAPPED_PER_S: Final = 10e9
ROUNDS: Final = 3
"""The ways of mapping take turns, since the GPU's clocks follow its load."""
STEPS: Final = ((32, 300), (256, 200), (64, 300))
"""Rows and number of decode steps; the last are beside swapping."""
TRIAL: Final = 21
"""Steps with ``--small``."""
MEAN_CONTEXT, SESSIONS = 1100, 500
Row = dict[str, Any]
Queue = Callable[[], Callable[[], object]]
"""Queues one step's work on the GPU, and returns what waits for it."""


def prefill(setting: Setting, most: int = 16) -> list[Row]:
    """Prompts of half a chunk to ``most`` chunks: one layer's attention, and the whole step (section 7.1, table 6)."""
    shape, found = setting.shape, {}
    points = [
        (shape.chunk // 2, shape.chunk // 2),
        *((shape.chunk, n * shape.chunk) for n in range(1, most + 1)),
    ]
    short = 4 * shape.chunk
    needs = [arena_bytes(setting, [point], point[1], point[1] <= short) for point in points]
    with arena(setting, max(needs)) as space:
        for new, context in _progress(points, "prefill"):
            found[new, context] = attention_ms(
                setting, f"prefill to {context}", [(new, context)], space, longest=context, sliced=context <= short,
                plain=context <= short, repeats=(2, 7) if context <= short else (1, 5),
            )  # fmt: skip
    products = {new: setting.product_ms(new) for new in {new for new, _ in points}}
    rows = []
    for chunks in [points[:1], *(points[1 : n + 1] for n in (1, 2, 4, 8, 16) if n <= most)]:
        names = [name for name in found[chunks[0]] if all(name in found[chunk] for chunk in chunks)]
        ms = {name: sum(found[chunk][name] for chunk in chunks) for name in names}
        row: Row = {"prompt": chunks[-1][1], **{name: round(value, 3) for name, value in ms.items()}}
        step = {name: shape.layers * (ms[name] + len(chunks) * products[chunks[0][0]]) for name in names}
        rows.append(row | _against("step ms, ", step))
    return rows


def decode(setting: Setting) -> list[Row]:
    """Attention of one layer, in ms; a request's range has addresses for its longest context (section 7.2, table 7)."""
    shape, rows = setting.shape, []
    points = [
        (batch, short * shape.chunk // 8192) for short in (1024, 4096) for batch in (1, 8, 32, 64, 128, 256)
    ]
    points = [
        (batch, context) for batch, context in points if batch * context <= 256 * 1024 * shape.chunk // 8192
    ]
    fits = {
        (batch, context): batch * context * shape.token_bytes <= shape.most_sliced
        for batch, context in points
    }
    needs = [arena_bytes(setting, [(1, c)] * batch, shape.longest, fits[batch, c]) for batch, c in points]
    with arena(setting, max(needs)) as space:
        for batch, context in _progress(points, "decode"):
            ms = attention_ms(
                setting, f"decode {batch} × {context}", [(1, context)] * batch, space, longest=shape.longest,
                sliced=fits[batch, context], plain=False, repeats=(20, 11),
            )  # fmt: skip
            row: Row = {
                "batch": batch,
                "context": context,
                **{name: round(value, 4) for name, value in ms.items()},
            }
            rows.append(row | _against("", ms))
    return rows


def _against(what: str, ms: dict[str, float]) -> Row:
    """Ours and the fastest contiguous kernel, in ms, and their ratio."""
    others = {name: value for name, value in ms.items() if name not in PAGED and "torch's" not in name}
    if "ours" not in ms or not others:
        return {f"{what}ours": round(ms["ours"], 3)} if what and "ours" in ms else {}
    best = min(others, key=others.__getitem__)
    shown = (
        {f"{what}ours": round(ms["ours"], 3), f"{what}best contiguous": round(others[best], 3)}
        if what
        else {}
    )
    return shown | {"best": best, "ours ÷ best": round(ms["ours"] / others[best], 3)}


class Mapper:
    """Backs a region page by page, on the caller's thread or on one of its own."""

    def __init__(self, region: Region, page: int, *, threaded: bool) -> None:
        self._region, self._page = region, page
        self._thread = ThreadPoolExecutor(1) if threaded else None
        self._asked: list[Future[None]] = []
        self.seconds = 0.0
        """Host time spent on mapping."""

    def ask(self, pages: int) -> None:
        """Map pages, up to this number in all, for the next step that has no order yet."""
        if self._thread is not None:
            self._asked.append(self._thread.submit(self._map, pages))

    def wait(self, step: int, pages: int) -> None:
        """Return when the pages that were asked for as number ``step`` are there. Raises MemoryError."""
        if self._thread is None:
            self._map(pages)
        elif step >= 0:
            self._asked[step].result()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _map(self, pages: int) -> None:
        started = time.perf_counter()
        if pages and self._region.permanent + pages * self._page > self._region.low:
            self._region.grow(self._region.permanent + pages * self._page, 0)
            self.seconds += time.perf_counter() - started


def steps(setting: Setting) -> list[Row]:
    """Decode steps, two in flight, while their requests grow page by page (section 6.1.1, figure 12), or swap.

    Synchronous: the launching thread maps before it launches. Overlapped: a thread maps for the next step while one
    runs. Eager: that thread is one page ahead of each request. Sliced: a page holds all layers' keys and values.
    """
    shape, rows = setting.shape, []
    per_sliced, per_unsliced = shape.page / shape.token_bytes, shape.page / shape.row_bytes
    slicing = {"sliced": (per_sliced, 1), "unsliced": (per_unsliced, 2 * shape.layers)}
    ways: dict[str, tuple[str, str]] = {"nothing mapped": ("", "sliced")}
    ways |= {f"{w}, {s}": (w, s) for s in slicing for w in ("synchronous", "overlapped", "eager")}
    for batch, steady in STEPS[:2]:
        count = steady if shape is LLAMA else TRIAL
        queue = _decode_step(setting, batch)
        turns = [(number, name) for number in range(ROUNDS) for name in ways]
        taken: dict[str, list[float]] = {name: [] for name in ways}
        mapping = dict.fromkeys(ways, 0.0)
        for number, name in _progress(turns, f"steps of {batch}"):
            way, sliced = ways[name]
            period, pages = slicing[sliced]
            phases = np.random.default_rng(number).uniform(0, period, batch)
            due = [pages * int(((phases + n + 1) // period).sum()) for n in range(count // ROUNDS + 1)]
            times, seconds = _grow_beside(setting, queue, due if way else [0] * len(due), way, int(period))
            taken[name] += times
            mapping[name] += 1e3 * seconds / len(due) / ROUNDS
        rows += [
            {"batch": batch, "way": name, "map ms a step": round(mapping[name], 3)}
            | _spread(taken[name], taken["nothing mapped"])
            for name in ways
        ]
        del queue
        tidy(setting)
    return rows + _beside_swap(setting)


def _decode_step(setting: Setting, batch: int) -> Queue:
    """Queue the work of all layers for ``batch`` rows: products, and our attention at a context of 1k."""
    products = setting.products(batch)
    attend = setting.ours(setting.data([(1, 1024 * setting.shape.chunk // 8192)] * batch))

    def step() -> None:
        for _ in range(setting.shape.layers):
            products(0)
            attend(0)

    return captured(setting, step)


def _run(
    queue: Queue, count: int, before: Callable[[int], object], after: Callable[[int], object]
) -> list[float]:
    """Milliseconds between the ends of steps, of which two are in flight; the first ones are left out."""
    flying: deque[Callable[[], object]] = deque()
    ended = []
    for step in range(count):
        before(step)
        flying.append(queue())
        after(step)
        if len(flying) == 2:
            flying.popleft()()
            ended.append(time.perf_counter())
    flying.popleft()()
    return [1e3 * float(gap) for gap in np.diff(ended)[2:]]


def _grow_beside(
    setting: Setting, queue: Queue, due: list[int], way: str, period: int
) -> tuple[list[float], float]:
    """Run one step for each entry of ``due`` but the last. An entry says how many pages must be mapped before its
    step. Return the steps' ms and the seconds spent on mapping.
    Eager: pages are needed ``period`` steps after they are asked for."""
    page, late = setting.shape.page, period if way == "eager" else 0
    region = setting.region((due[-1] + 1) * page, page)
    mapper = Mapper(region, page, threaded=way in ("overlapped", "eager"))
    try:
        mapper.ask(due[0])
        return _run(
            queue, len(due) - 1, lambda step: mapper.wait(step - late, due[step]),
            lambda step: mapper.ask(due[step + 1]),
        ), mapper.seconds  # fmt: skip
    finally:
        mapper.close()
        setting.wait()
        region.free()


def _beside_swap(setting: Setting) -> list[Row]:
    """Steps while a thread maps and unmaps what 10 GB/s of swapped data take: each byte once either way."""
    batch, count = STEPS[2][0], (STEPS[2][1] if setting.shape is LLAMA else TRIAL) // ROUNDS
    queue, piece = _decode_step(setting, batch), SHARE * setting.shape.page
    handles = {"nothing mapped": 0}
    handles |= {f"swap, handles of {size >> 10} KiB": size for size in (setting.shape.page, piece)}
    taken: dict[str, list[float]] = {name: [] for name in handles}
    busy, moved, seconds = (dict.fromkeys(handles, 0.0) for _ in range(3))

    def swap(name: str, region: Region, stop: threading.Event) -> None:
        began, pieces = time.perf_counter(), 0
        while not stop.is_set():
            started = time.perf_counter()
            region.step(region.permanent + piece, 0)
            region.step(0, 0)
            ended, pieces = time.perf_counter(), pieces + 1
            busy[name] += ended - started
            time.sleep(max(0.0, began + pieces * piece / SWAPPED_PER_S - ended))
        moved[name] += pieces * piece
        seconds[name] += time.perf_counter() - began

    for name in _progress([*handles] * ROUNDS, "swap"):
        stop, region = threading.Event(), setting.region(2 * piece, handles[name] or piece)
        with ThreadPoolExecutor(1) as thread:
            swapping = thread.submit(swap, name, region, stop) if handles[name] else None
            try:
                taken[name] += _run(queue, count, lambda step: None, lambda step: None)
            finally:
                stop.set()
        setting.wait()
        region.free()
        if swapping is not None:
            swapping.result()
    return [
        {
            "batch": batch, "way": name, "map ms a step": round(1e3 * busy[name] / count / ROUNDS, 3),
            **_spread(taken[name], taken["nothing mapped"]),
            "GB/s": round(moved[name] / seconds[name] / 1e9, 2) if handles[name] else "",
        }
        for name in handles
    ]  # fmt: skip


def _spread(ms: list[float], alone: list[float]) -> Row:
    """Step times, and their ratios to those of steps while nothing is mapped."""
    row: Row = {
        f"{name} ms": round(float(np.quantile(ms, q)), 3)
        for name, q in (("median", 0.5), ("p99", 0.99), ("max", 1))
    }
    row["median ÷ nothing"] = round(statistics.median(ms) / statistics.median(alone), 4)
    return row | {"mean ÷ nothing": round(statistics.fmean(ms) / statistics.fmean(alone), 4)}


def first(setting: Setting, step_ms: float) -> list[Row]:
    """The first prefill of 16k tokens, ``step_ms`` long: with its pages mapped before it, and without (section 6.1.2,
    figure 13). Kept: a finished request's handles are mapped again. Taken over: its range is, by no call."""
    shape, rows = setting.shape, []
    num_bytes = 2 * shape.chunk * shape.token_bytes
    for handle in (shape.page, SHARE * shape.page):
        taken: dict[str, list[float]] = {"mapped": [], "kept": [], "taken over": []}
        for _ in _progress(range(3), "first prefill"):
            region = setting.region(num_bytes + handle, handle, kept=num_bytes)
            for name, seconds in taken.items():
                started = time.perf_counter()
                region.grow(region.permanent + num_bytes, 0)
                seconds.append(time.perf_counter() - started)
                if name == "mapped":
                    region.step(0, 0)
            region.free()
        for name, seconds in taken.items():
            ms = 1e3 * statistics.median(seconds)
            row: Row = {"handle KiB": handle >> 10, "handles": -(-num_bytes // handle), "pages": name}
            rows.append(
                row | {"map ms": round(ms, 3), "prefill ÷ taken over": round((step_ms + ms) / step_ms, 4)}
            )
    return rows


def waste() -> list[Row]:
    """Memory held beyond the tokens of 500 sessions, in tokens for each (computed; section 8.2, table 10)."""
    shape: Shape = LLAMA
    contexts = np.ceil(np.random.default_rng(0).exponential(MEAN_CONTEXT, SESSIONS))
    rows = []
    for name, unit in (
        ("chunks of 32", 32.0), ("sliced pages", shape.page / shape.token_bytes),
        (f"unsliced pages, {2 * shape.layers} ranges", shape.page / shape.row_bytes),
    ):  # fmt: skip
        held = np.ceil(contexts / unit) * unit - contexts
        row: Row = {"unit": name, "tokens a unit": round(unit, 2), "mean": round(float(held.mean()), 1)}
        row |= {
            "p99": round(float(np.quantile(held, 0.99)), 1),
            "MiB": round(float(held.mean()) * shape.token_bytes / 2**20, 2),
        }
        rows.append(row | {"share of memory": round(float(held.sum() / (held + contexts).sum()), 4)})
    return rows


def gate(found: dict[str, list[Row]], shape: Shape) -> list[Row]:
    """A contiguous layout becomes an option if all three hold (``bench/results/vmm.md``)."""
    stepped = found.get("steps", [])
    long = [row.get("ours ÷ best") for row in found.get("prefill", []) if row["prompt"] == 4 * shape.chunk]
    ratios = {
        batch: [
            row["mean ÷ nothing"]
            for row in stepped
            if row["batch"] == batch and row["way"] != "nothing mapped"
        ]
        for batch in (64, 256)
    }
    figures = (
        ("prefill step at 32k, ours ÷ best contiguous", long[0] if long else None, 1.10),
        ("decode at batch 256, best way ÷ nothing mapped", min(ratios[256], default=None), 1.01),
        ("steps at 10 GB/s of swap, best handles ÷ nothing mapped", min(ratios[64], default=None), 1.05),
    )
    rows: list[Row] = []
    for number, (name, figure, limit) in enumerate(figures):
        holds = figure is not None and (figure <= limit if number else figure >= limit)
        row: Row = {
            "gate": name,
            "figure": figure or "not measured",
            "limit": f"{'≤' if number else '≥'} {limit:.2f}",
        }
        rows.append(row | {"passed": "not measured" if figure is None else "yes" if holds else "no"})
    verdict = "an option" if all(row["passed"] == "yes" for row in rows) else "no option"
    if any(row["passed"] == "not measured" for row in rows) and all(row["passed"] != "no" for row in rows):
        verdict = "not decided"
    return [*rows, {"gate": "a contiguous layout", "passed": verdict}]


def _progress(items: Iterable[Any], what: str) -> Iterable[Any]:
    """A progress bar without a thread, which would run beside what is timed."""
    return track(items, what, console=Console(stderr=True), auto_refresh=False)


SECTIONS = ("prefill", "decode", "steps", "first", "waste")


@click.command(context_settings={"show_default": True})
@click.option("--section", "sections", multiple=True, type=click.Choice(SECTIONS), default=SECTIONS)
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("bench/results"), help="Folder of the report."
)
@click.option("--name", default="vmm", help="NAME.json and NAME.md.")
@click.option(
    "--fa3",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="vLLM's FlashAttention-3 extension, _vllm_fa3_C*.so or that packed as .xz; found by itself if installed.",
)
@click.option("--small", is_flag=True, help="Tiny sizes on a CPU: shows that it runs.")
def main(sections: tuple[str, ...], out: Path, name: str, fa3: Path | None, small: bool) -> None:
    """Compare contiguous KV by virtual memory with pages."""
    if not small and not torch.cuda.is_available():
        raise click.ClickException("torch sees no CUDA device here")
    import triton

    torch.set_grad_enabled(False)
    setting = Setting(
        TINY if small else LLAMA, torch.device("cpu" if small else "cuda"), None if small else find(fa3), []
    )
    found: dict[str, list[Row]] = {}
    for each in (section for section in SECTIONS if section in sections):
        try:
            if each == "first":
                rows = found.get("prefill") or prefill(setting, 2)
                found[each] = first(
                    setting,
                    next(row["step ms, ours"] for row in rows if row["prompt"] == 2 * setting.shape.chunk),
                )
            else:
                makers: dict[str, Callable[[Setting], list[Row]]] = {
                    "prefill": prefill,
                    "decode": decode,
                    "steps": steps,
                    "waste": lambda _: waste(),
                }
                found[each] = makers[each](setting)
        except (RuntimeError, MemoryError, LookupError, StopIteration) as error:
            setting.note("the section", each, error)  # the figures of the others are worth keeping
        tidy(setting)
    found["gate"] = gate(found, setting.shape)
    report = {
        "schema": "pensieve.vmm/1", "command": f"python {portable(sys.argv)}", "commit": commit(),
        "device": gpu_name() if not small else "CPU, tiny sizes", "driver": driver_version(),
        "torch": torch.__version__,
        "triton": triton.__version__, "notes": setting.notes, **found,
    }  # fmt: skip
    lines = [
        f"`{report['command']}`", "",
        f"{report['device']}, driver {report['driver'] or 'none'}, torch {report['torch']}, Triton {report['triton']}, "
        f"commit {report['commit'] or 'unknown'}. Times in ms.",
    ]  # fmt: skip
    for section, rows in found.items():
        lines += ["", f"## {section}", "", *table(rows)]
    lines += ["", *(f"* Not measured: {note}" for note in setting.notes)]
    write_report(out, name, report, lines)
    click.echo("\n".join(lines))


if __name__ == "__main__":
    main()
