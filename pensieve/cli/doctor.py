"""``pensieve doctor``: what this machine can do, and what is missing, with the fix.

Each check looks at one thing, changes nothing, and returns what it found. It never raises for what it is there to find:
a broken import or a closed port is its result.
"""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import re
import resource
import shutil
import socket
import sqlite3
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal
from urllib.error import URLError
from urllib.parse import parse_qsl, urlencode, urlsplit
from urllib.request import ProxyHandler, build_opener

import click
import msgspec
from rich.console import Console
from rich.text import Text

from pensieve import extras
from pensieve.cli import output
from pensieve.gguf import read_gguf
from pensieve.machine import memory, usable_cores, user_path
from pensieve.options import serve as options
from pensieve.options.commands import models
from pensieve.options.values import split_address

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
    """Checks which package `kernels` transformers would import: ours must never be a top-level package."""
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


DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")
OLDEST_TRITON: Final = (3, 4)
OLDEST_CAPABILITY: Final = (8, 0)
"""First NVIDIA architecture with bfloat16 matrix units, and the oldest that Triton's kernels here are made for."""


def accelerator() -> Iterator[Check]:
    """torch, the GPUs it sees, and what its kernels and copies need."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        yield Check(
            "accelerator", "torch", "fail", f"cannot be imported: {error}", "pip install torch==2.13.0"
        )
        return
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    yield Check(
        "accelerator", "torch", "ok", f"{torch.__version__}, {built}, {torch.get_num_threads()} threads"
    )
    if not torch.cuda.is_available():
        yield _no_gpu(torch)
        return
    driver = driver_version()
    yield Check("accelerator", "driver", "ok", driver or "version unknown")
    for index in range(torch.cuda.device_count()):
        yield _gpu(torch, index)
    yield from gpu_links(torch)
    yield _triton()
    yield _compiler()
    yield _pinned()


def driver_version(file: Path = DRIVER_FILE) -> str | None:
    """Version of the NVIDIA kernel module; None when it is not loaded."""
    try:
        text = file.read_text()
    except OSError:
        return None
    match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return match[1] if match else None


def _no_gpu(torch: Any) -> Check:
    """Why there is none, as far as can be told."""
    driver, nodes = driver_version(), list(Path("/dev").glob("nvidia[0-9]*"))
    if driver is None and not nodes:
        found, fix = "none: no NVIDIA driver", "none needed for the CPU; for a GPU: install NVIDIA's driver"
    elif not nodes:
        found = f"none: driver {driver}, but no device in this container"
        fix = "start the container with its GPUs (docker run --gpus all)"
    elif torch.version.cuda is None:
        found = f"none: driver {driver or 'unknown'}, but this torch is built without CUDA"
        fix = "install a CUDA build of torch"
    else:
        found = f"none: driver {driver or 'unknown'}, torch for CUDA {torch.version.cuda} sees no device"
        fix = "update the driver to one for that CUDA, and check CUDA_VISIBLE_DEVICES"
    return Check("accelerator", "gpu", "note", found, fix)


def _gpu(torch: Any, index: int) -> Check:
    name = torch.cuda.get_device_name(index)
    capability = tuple(torch.cuda.get_device_capability(index))
    free, total = torch.cuda.mem_get_info(index)
    found = (
        f"{name}, compute capability {capability[0]}.{capability[1]}, "
        f"{total / GIB:.0f} GiB, {free / GIB:.0f} GiB free"
    )
    if capability < OLDEST_CAPABILITY:
        return Check(
            "accelerator", f"gpu {index}", "fail", found, "needs compute capability 8.0; or --device cpu"
        )
    if free < total / 2:
        return Check("accelerator", f"gpu {index}", "note", found, "other programs use it: see nvidia-smi")
    return Check("accelerator", f"gpu {index}", "ok", found)


def _triton() -> Check:
    try:
        version = str(importlib.import_module("triton").__version__)
    except ImportError as error:
        return Check("accelerator", "triton", "fail", f"cannot be imported: {error}", "pip install triton")
    old = tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_TRITON
    fix = f"needs {OLDEST_TRITON[0]}.{OLDEST_TRITON[1]}" if old else ""
    return Check("accelerator", "triton", "fail" if old else "ok", version, fix)


def _compiler() -> Check:
    """Triton compiles a small launcher in C for each kernel."""
    found = next((path for name in ("gcc", "clang", "cc") if (path := shutil.which(name))), None)
    if found is None:
        fix = "install gcc, or name a compiler in CC: Triton's kernels need one"
        return Check("accelerator", "C compiler", "note", "no gcc, clang or cc", fix)
    return Check("accelerator", "C compiler", "ok", found)


def _pinned() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("accelerator", "pinned memory", "ok", "no limit (ulimit -l)")
    found = f"ulimit -l is {soft / 1024:.0f} KiB; CUDA's own pinning is usually not bound by it"
    fix = "if pinning the host tier fails: ulimit -l unlimited, docker run --ulimit memlock=-1"
    return Check("accelerator", "pinned memory", "note", found, fix)


TOPOLOGY_PATIENCE_S: Final = 10.0
_ESCAPES = re.compile(r"\x1b\[[\d;]*m")
_KINDS: Final = {
    "PIX": "one PCIe switch",
    "PXB": "PCIe switches",
    "PHB": "PCIe through the CPU",
    "NODE": "PCIe through the CPU",
    "SYS": "PCIe and the link between CPUs",
}
"""What ``nvidia-smi topo -m`` calls paths that are no NVLink."""

Pair = tuple[int, int]


def gpu_links(torch: Any) -> Iterator[Check]:
    """How each GPU reaches the others; nothing when there is only one."""
    count = torch.cuda.device_count()
    if count < 2:
        return
    pairs = list(itertools.combinations(range(count), 2))
    kinds = topology(_matrix())
    by_kind: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_kind[kinds.get(pair, "unknown")].append(pair)
    found = "; ".join(f"{_name(kind)} between {_list(of, pairs)}" for kind, of in by_kind.items())
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if apart:
        fix = "--tensor-parallel goes through host memory there, slowly: is the IOMMU on, or this a virtual machine?"
        yield Check("accelerator", "gpu links", "note", f"{found}; no peer access {_list(apart, pairs)}", fix)
    elif any(kind.startswith("NV") for kind in by_kind):
        yield Check("accelerator", "gpu links", "ok", found)
    else:
        fix = "--tensor-parallel gains little over PCIe; run one server for each GPU unless the model needs several"
        yield Check("accelerator", "gpu links", "note", found, fix)


def topology(matrix: str) -> dict[Pair, str]:
    """The link of each pair of GPUs in what ``nvidia-smi topo -m`` prints; {} of anything else."""
    lines = [_ESCAPES.sub("", line) for line in matrix.splitlines()]
    columns = next((re.findall(r"GPU(\d+)", line) for line in lines if line.count("GPU") > 1), [])
    found = {}
    for line in lines:
        row = re.match(r"GPU(\d+)\s+(\S.*)", line.strip())
        if row is None or row[2].startswith("GPU"):
            continue
        for column, kind in zip(columns, row[2].split(), strict=False):
            first, second = sorted((int(row[1]), int(column)))
            if first != second:
                found[first, second] = kind
    return found


def _matrix() -> str:
    path = shutil.which("nvidia-smi")
    if path is None:
        return ""
    try:
        done = subprocess.run(
            [path, "topo", "-m"], capture_output=True, text=True, timeout=TOPOLOGY_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _name(kind: str) -> str:
    nvlink = re.fullmatch(r"NV(\d+)", kind)
    return f"NVLink ({nvlink[1]} links)" if nvlink else _KINDS.get(kind, f"a link of kind {kind}")


def _list(some: list[Pair], every: list[Pair]) -> str:
    return "all" if some == every else ", ".join(f"{first}-{second}" for first, second in some)


ANSWER_PATIENCE_S: Final = 2.0
OWN_METRIC: Final = b"pensieve_build_info"
"""A metric that every server has."""


def port(name: str, address: str) -> Check:
    """Whether the address can be listened on now. A server of ours that is there already is nothing wrong."""
    host, number = split_address(address)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            host, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and (_serves_metrics if name == "admin" else _serves)(address):
            fix = f"none needed; a second server wants another --{name}"
            return Check("ports", name, "note", f"{address}: a server of Pensieve is there", fix)
        fix = f"stop what uses it, or choose another --{name}"
        return Check("ports", name, "fail", f"{address}: {error.strerror or error}", fix)
    return Check("ports", name, "ok", f"{address}{': any free port' if number == 0 else ' is free'}")


def _serves(address: str) -> bool:
    """Whether it answers as Pensieve does, if only to say that it wants a key. One with TLS is not recognised."""
    from pensieve.client import Client
    from pensieve.errors import PensieveError

    try:
        with Client(address, timeout=ANSWER_PATIENCE_S, retry_for=0) as client:
            client.server_info()
    except PensieveError as error:
        return error.reason.startswith("CREDENTIAL_")
    return True


def _serves_metrics(address: str) -> bool:
    try:
        with build_opener(ProxyHandler({})).open(
            f"http://{address}/metrics", timeout=ANSWER_PATIENCE_S
        ) as answer:
            return OWN_METRIC in answer.read(1 << 20)
    except (URLError, OSError, ValueError):
        return False


_DEFAULTS = options.ServeOptions()
_NAME: Final = 24
"""Columns of a name."""
_NARROW: Final = 60
_COLOUR = {"ok": "green", "note": "yellow", "fail": "red"}


def run_checks(resolved: options.ServeOptions) -> list[Check]:
    """Every check, with the addresses, store and model of these options."""
    is_server = extras.installed("server")
    return [
        *system(),
        *packages(),
        *(accelerator() if is_server else ()),
        *store(resolved.store),
        *(model(resolved.model) if is_server else ()),
        port("listen", resolved.listen),
        port("admin", resolved.admin),
    ]


def show(findings: list[Check], console: Console) -> None:
    """A paragraph per finding, its fix below it, and one last line with the verdict.

    It is wrapped below itself where the console is narrow.
    """
    area = ""
    for check in findings:
        if check.area != area:
            area = check.area
            console.print(Text(area, style="bold"))
        for number, line in enumerate(_lines(check, console.width)):
            text = Text(line)
            if number == 0:
                text.stylize(_COLOUR[check.state], 0, len(check.state))
            console.print(text, soft_wrap=True)
    blocking = sum(check.state == "fail" for check in findings)
    verdict = "ready" if not blocking else f"{blocking} blocking problem{'s' if blocking > 1 else ''}"
    console.print(Text(verdict, style="red" if blocking else "green"))


def _lines(check: Check, width: int) -> list[str]:
    """The finding, wrapped to the given columns. Paths and commands are not cut apart: they are there to be copied."""
    head = f"{check.state:5} {check.name}: " if width < _NARROW else f"{check.state:5} {check.name:{_NAME}} "
    left = " " * (6 if width < _NARROW else len(f"{'':5} {'':{_NAME}} "))
    fix = f"fix: {check.fix}" if check.fix and check.state != "ok" else ""
    return [
        line
        for first, text in ((head, check.found), (left, fix))
        for line in textwrap.wrap(
            text,
            width,
            initial_indent=first,
            subsequent_indent=left,
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]


@click.command()
@click.option(
    "--model",
    envvar="PENSIEVE_SERVE_MODEL",
    metavar="MODEL",
    help=f"Folder, GGUF file, hub id, `smollm2` or `demo`.  [default: {_DEFAULTS.model}]",
    shell_complete=models,
)
@click.option(
    "--store",
    envvar="PENSIEVE_SERVE_STORE",
    metavar="URL",
    help="History store to try.  [default: as `pensieve serve`]",
)
@click.option(
    "--listen",
    envvar="PENSIEVE_SERVE_LISTEN",
    metavar="HOST:PORT",
    help=f"gRPC address to try.  [default: {_DEFAULTS.listen}]",
)
@click.option(
    "--admin",
    envvar="PENSIEVE_SERVE_ADMIN",
    metavar="HOST:PORT",
    help=f"Admin address to try.  [default: {_DEFAULTS.admin}]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def doctor(as_json: bool, **given: str | None) -> None:
    """Show what this machine can do, and what is missing, with the fix.

    What the environment sets for `pensieve serve` is looked at as well. Exit code 1 when something would keep
    `pensieve serve` with these options from working.
    """
    # Whether an address is wise to listen on is the server's question; here only whether it can be had.
    resolved = options.resolve({**given, "insecure-i-know": True}).options
    findings = run_checks(resolved)
    blocking = any(check.state == "fail" for check in findings)
    if as_json:
        report = {"ok": not blocking, "checks": findings}
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2))
    else:
        show(findings, output.stdout())
    sys.exit(1 if blocking else 0)
