"""Cost profiles in the user's cache folder, by model, device, dtype and chunk size; and which one an engine uses."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import platform
import re
from pathlib import Path
from typing import Any

from pensieve.config import EngineOptions
from pensieve.engine.cost.model import CostModel, CostProfileError
from pensieve.engine.cost.probe import QUICK_REPEATS, Info, ProbedWorker, describe, quick_points
from pensieve.machine import usable_cores, user_directory
from pensieve.model.arch import Arch

log = logging.getLogger(__name__)

_NOT_COMPUTED = ("bos_token_id", "eos_token_ids", "generation", "dtype")
"""Fields of an ``Arch`` that make no difference to what a step costs; the dtype in use is a part of the key itself."""


def profile_directory() -> Path:
    """``$XDG_CACHE_HOME/pensieve/profiles`` or ``~/.cache/pensieve/profiles``."""
    return user_directory("XDG_CACHE_HOME", ".cache") / "profiles"


def fingerprint(arch: Arch) -> str:
    """A name for the computation that ``arch`` describes: 12 hex digits."""
    values = {name: value for name, value in dataclasses.asdict(arch).items() if name not in _NOT_COMPUTED}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def device_name(info: Info) -> str:
    """What a profile is measured on: the GPU's name, or what can be told of the CPU; how many ranks, if several."""
    several = f"{info.ranks} x " if info.ranks > 1 else ""
    if info.device == "cuda":
        import torch

        return several + str(torch.cuda.get_device_name())
    return f"{several}{platform.machine()} cpu {usable_cores()} cores"


def profile_path(worker: ProbedWorker, name_of_device: str) -> Path:
    """Where the profile of this worker lies, or would lie."""
    info = worker.info
    device = re.sub(r"[^a-z0-9]+", "-", name_of_device.lower()).strip("-")
    chunk = f"chunk{info.chunk_tokens}"
    parts = (worker.arch.family, fingerprint(worker.arch), device, info.dtype, chunk)
    return profile_directory() / ("-".join(parts) + ".json")


def write_profile(path: Path, profile: dict[str, Any]) -> None:
    """Write the whole file or nothing: other servers may read it meanwhile. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(profile, indent=2) + "\n")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def stored_or_quick_profile(options: EngineOptions, worker: ProbedWorker) -> CostModel:
    """The cost model that ``options.cost_profile`` asks for.

    A file: what it says; raises CostProfileError when it cannot be used. ``estimate``: an estimate from the
    architecture. ``auto``: the stored profile of this model and machine, if there is one; else a GPU is measured for a
    few seconds and the result stored, and a CPU gets the estimate. Call this before the cache holds anything: measuring
    writes into the KV pool.
    """
    if options.cost_profile == "estimate":
        return estimate(worker)
    if options.cost_profile != "auto":
        return from_file(Path(options.cost_profile), options.chunk_tokens)
    name = device_name(worker.info)
    path = profile_path(worker, name)
    if path.exists():
        try:
            cost = from_file(path, worker.info.chunk_tokens)
        except CostProfileError as error:
            log.warning("the stored cost profile cannot be used and is replaced: %s", error)
        else:
            log.info("cost profile: %s", path)
            return cost
    if worker.info.device != "cuda":
        return estimate(worker)
    return _quick(options, worker, name, path)


def estimate(worker: ProbedWorker) -> CostModel:
    """A cost model from the architecture alone."""
    arch = worker.arch
    return CostModel.estimate(
        layers=arch.num_layers,
        query_heads=arch.num_heads,
        head_dim=arch.head_dim,
        parameters=arch.num_parameters,
        chunk_tokens=worker.info.chunk_tokens,
        context_limit=arch.context_limit,
    )


def from_file(path: Path, chunk_tokens: int) -> CostModel:
    """The model in a file, measured with chunks of this size. Raises CostProfileError."""
    cost = CostModel.from_json(path)
    if cost.chunk_tokens != chunk_tokens:
        raise CostProfileError(
            f"{path} was measured with chunks of {cost.chunk_tokens} tokens, not {chunk_tokens}: profile again with "
            f"--chunk-tokens {chunk_tokens}"
        )
    return cost


def _quick(options: EngineOptions, worker: ProbedWorker, name: str, path: Path) -> CostModel:
    log.info("cost profile: none stored for this model on %s; measuring one, a few seconds", name)
    try:
        points = quick_points(worker)
    except ValueError as error:
        log.info("cost profile: estimated, since %s", error)
        return estimate(worker)
    profile = describe(worker, options.model, points, device_name=name, repeats=QUICK_REPEATS)
    try:
        write_profile(path, profile)
    except OSError as error:
        log.warning("the cost profile cannot be stored, so the next start will measure again: %s", error)
    else:
        log.info("cost profile: stored as %s; `pensieve profile` makes a finer one", path)
    return CostModel(tuple(profile["attention"]), profile["other_seconds"], worker.info.chunk_tokens)
