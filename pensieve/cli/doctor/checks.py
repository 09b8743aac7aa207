"""The checks behind ``pensieve doctor``. Each looks at one thing, changes nothing, and returns what it found.

A check never raises for what it is there to find: a broken import or a closed port is its result.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal
from urllib.parse import parse_qsl, urlencode, urlsplit

import msgspec

from pensieve import extras
from pensieve.gguf import read_gguf
from pensieve.machine import memory, usable_cores, user_path

State = Literal["ok", "note", "fail"]
OLDEST_SQLITE = (3, 35, 0)
"""RETURNING and the WAL behaviour that the SQLite store was tested with."""
GIB = 1024**3


class Check(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finding. ``fail`` blocks a server with these options, ``note`` costs something, ``fix`` says what to do."""

    area: str
    name: str
    state: State
    found: str
    fix: str = ""


def system() -> Iterator[Check]:
    """Python, operating system, cores, memory."""
    version = platform.python_version()
    yield Check(
        "system", "python", "ok" if sys.version_info >= (3, 11) else "fail", version, "install Python 3.11"
    )
    yield Check("system", "platform", "ok", f"{platform.system()} {platform.release()} {platform.machine()}")
    yield Check("system", "cores", "ok", str(usable_cores()))
    found_memory = memory()
    total, free = found_memory.total, found_memory.available
    state: State = "ok" if free > 2 * GIB else "note"
    found = f"{total / GIB:.1f} GiB, {free / GIB:.1f} GiB available"
    yield Check(
        "system", "memory", state, found, "" if state == "ok" else "lower --device-cache and --host-cache"
    )


def packages() -> Iterator[Check]:
    """Every dependency that a server has: installed, importable at all, which version."""
    if not extras.installed("server"):
        yield Check(
            "packages", "server", "fail", "only a client is installed", "pip install 'pensieve[server]'"
        )
    for name, part in sorted(_dependencies().items()):
        try:
            yield Check("packages", name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            if part != _CLIENT and not extras.installed("server"):
                continue  # one line says it all
            needed = name != "triton"  # on other systems than Linux there is none, and the reference runs
            yield Check("packages", name, "fail" if needed else "note", "missing", f"pip install '{part}'")
    yield _kernels_name()


_CLIENT: Final = "pensieve"


def _dependencies() -> dict[str, str]:
    """Name of a dependency of a server → what to install so that it is there."""
    found: dict[str, str] = {}
    for line in importlib.metadata.requires("pensieve") or []:
        extra = re.search(r"extra == ['\"](\w+)", line)
        if (extra is None or extra[1] in ("server", "http")) and _name_of(line) != "pensieve":
            found.setdefault(_name_of(line), f"pensieve[{extra[1]}]" if extra else _CLIENT)
    return found


def _name_of(requirement: str) -> str:
    end = next(
        (i for i, char in enumerate(requirement) if not (char.isalnum() or char in "-_.")), len(requirement)
    )
    return requirement[:end]


def _kernels_name() -> Check:
    """Whose `kernels` transformers would import: ours must never be a top-level package."""
    spec = importlib.util.find_spec("kernels")
    if spec is None:
        return Check("packages", "kernels", "ok", "no top-level package of that name")
    if spec.origin is None:
        places = ", ".join(spec.submodule_search_locations or [])
        return Check(
            "packages",
            "kernels",
            "note",
            f"a folder without __init__.py in {places} is on sys.path",
            "start with `pensieve`, not with `python -m` from the checkout",
        )
    try:
        return Check(
            "packages", "kernels", "ok", f"the PyPI package, {importlib.metadata.version('kernels')}"
        )
    except importlib.metadata.PackageNotFoundError:
        return Check(
            "packages", "kernels", "fail", f"shadowed by {spec.origin}", "remove that folder from sys.path"
        )


def store(url: str) -> Iterator[Check]:
    """The history store: library version, folder or connection. Creates nothing."""
    if url == "memory:":
        yield Check(
            "store", "memory", "note", "history is lost when the server ends", "--store sqlite:///PATH"
        )
    elif url.startswith("sqlite:"):
        yield from _sqlite(Path(url.removeprefix("sqlite:///")))
    elif url.startswith(("redis://", "rediss://")):
        yield _redis(url)
    else:
        where = urlsplit(url).netloc.rpartition("@")[2]
        yield Check("store", "redis", "note", f"{where}: several servers, looked at when the server starts")


def _sqlite(path: Path) -> Iterator[Check]:
    good = sqlite3.sqlite_version_info >= OLDEST_SQLITE
    oldest = ".".join(map(str, OLDEST_SQLITE))
    yield Check(
        "store", "sqlite", "ok" if good else "fail", sqlite3.sqlite_version, "" if good else f"needs {oldest}"
    )
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    target = path if path.exists() else folder
    if os.access(target, os.R_OK | os.W_OK) and os.access(folder, os.W_OK | os.X_OK):
        yield Check("store", "file", "ok", f"{path}{'' if path.exists() else ' (not there yet)'}")
    else:
        yield Check("store", "file", "fail", f"{target} is not writable", "--store sqlite:///PATH elsewhere")


def _redis(url: str) -> Check:
    parts = urlsplit(url)
    where = f"{parts.hostname}:{parts.port or 6379}"  # never the URL: it may hold a password
    try:
        redis = importlib.import_module("redis")
    except ImportError as error:
        return Check("store", "redis", "fail", f"no client: {error}", "pip install 'pensieve[server]'")
    query = urlencode(
        [pair for pair in parse_qsl(parts.query) if pair[0] != "replicas"]
    )  # ours, not the client's
    client = redis.Redis.from_url(
        parts._replace(query=query).geturl(), socket_timeout=2.0, socket_connect_timeout=2.0
    )
    try:
        info = client.info()
    except redis.RedisError as error:
        return Check("store", "redis", "fail", f"{where}: {error}", "start redis-server, or correct --store")
    finally:
        client.close()
    version = info["redis_version"]
    if not info.get("aof_enabled"):
        fix = "redis-cli config set appendonly yes"
        return Check(
            "store", "redis", "note", f"{where}: {version}, no append-only file: a crash loses history", fix
        )
    return Check("store", "redis", "ok", f"{where}: {version}, append-only file on")


def model(name: str) -> Iterator[Check]:
    """The model's folder or file: architecture, weights, tokenizer, chat template. Downloads nothing."""
    from pensieve.model.arch import ModelError
    from pensieve.model.folder import load_arch
    from pensieve.model.resolve import is_path, resolve_model

    if name != "demo" and not is_path(name) and not user_path(name).exists():
        fix = "pass a folder or a GGUF file, or let `pensieve serve` download it"
        found = "not a folder or file here; other names are looked at when the server starts"
        yield Check("model", name, "note", found, fix)
        return
    try:
        folder = resolve_model(name)
        arch = load_arch(folder)
    except ModelError as error:
        yield Check("model", "architecture", "fail", str(error), "name a model of a supported family")
        return
    except ImportError as error:
        yield Check("model", "packages", "fail", f"no {error.name}", "pip install 'pensieve[gguf]'")
        return
    found = f"{arch.family}, {arch.num_layers} layers, context {arch.context_limit}, {arch.num_parameters / 1e6:.1f} M"
    yield Check("model", "architecture", "ok", found)
    yield _weights(folder)
    yield from _tokenizer(folder)


def _weights(folder: Path) -> Check:
    if folder.is_file():
        headers = read_gguf(folder).headers
        size = sum(path.stat().st_size for path, _ in headers)
        return Check("model", "weights", "ok", f"{len(headers)} GGUF file(s), {size / GIB:.2f} GiB")

    from pensieve.model.arch import ModelError
    from pensieve.model.files import weight_files

    try:
        files = weight_files(folder)
    except ModelError as error:
        fix = "download the whole model (only safetensors are read), or --load-format dummy"
        return Check("model", "weights", "fail", str(error), fix)
    size = sum(file.stat().st_size for file in files)
    return Check("model", "weights", "ok", f"{len(files)} file(s), {size / GIB:.2f} GiB")


def _tokenizer(folder: Path) -> Iterator[Check]:
    from pensieve.errors import InvalidArgument
    from pensieve.tokenizer.folder import read_folder

    try:
        tokenizer = read_folder(folder)
    except InvalidArgument as error:
        yield Check("model", "tokenizer", "fail", error.message, "download the model's tokenizer files too")
        return
    yield Check("model", "tokenizer", "ok", f"{tokenizer.vocab_size} tokens")
    has_template = tokenizer.template is not None
    fix = "" if has_template else "--chat-template FILE.jinja"
    found = "the model's own" if has_template else "none: turns are joined as plain text"
    yield Check("model", "chat template", "ok" if has_template else "note", found, fix)
