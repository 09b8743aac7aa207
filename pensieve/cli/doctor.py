"""``pensieve doctor``: what this machine has and lacks for a server, with suggested fixes.

Each check examines one thing, changes nothing, and returns its finding. A problem that it looks for, such as a
broken import or a port in use, is a finding and never an exception.
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
from collections.abc import Iterable, Iterator
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
"""First version with RETURNING, and with the WAL behaviour that the SQLite store was tested with."""
GIB = 1024**3


class Check(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finding. ``fail`` blocks a server with these options, ``note`` is a drawback, ``fix`` says what to do."""

    name: str
    state: State
    found: str
    fix: str = ""
    area: str = ""


def system() -> Iterator[Check]:
    version = platform.python_version()
    yield Check("python", "ok" if sys.version_info >= (3, 11) else "fail", version, "install Python 3.11")
    yield Check("platform", "ok", f"{platform.system()} {platform.release()} {platform.machine()}")
    yield Check("cores", "ok", str(usable_cores()))
    found_memory = memory()
    total, free = found_memory.total, found_memory.available
    state: State = "ok" if free > 2 * GIB else "note"
    found = f"{total / GIB:.1f} GiB, {free / GIB:.1f} GiB available"
    yield Check("memory", state, found, "" if state == "ok" else "lower --device-cache and --host-cache")


def packages() -> Iterator[Check]:
    if not extras.installed("server"):
        yield Check("server", "fail", "only a client is installed", "pip install 'pensieve[server]'")
    for name, part in sorted(_dependencies().items()):
        try:
            yield Check(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            if part != _CLIENT and not extras.installed("server"):
                continue  # the finding above covers them
            needed = name != "triton"  # exists for Linux only; elsewhere the reference kernels run
            yield Check(name, "fail" if needed else "note", "missing", f"pip install '{part}'")
    yield _kernels_package()


_CLIENT: Final = "pensieve"


def _dependencies() -> dict[str, str]:
    """Return each dependency of a server → the requirement that installs it."""
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


def _kernels_package() -> Check:
    """Check which package transformers would import as `kernels`: ours must never be a top-level package."""
    spec = importlib.util.find_spec("kernels")
    if spec is None:
        return Check("kernels", "ok", "no other package has this name, as it should be")
    if spec.origin is None:
        places = ", ".join(spec.submodule_search_locations or [])
        return Check(
            "kernels",
            "note",
            f"a folder without __init__.py in {places} is on sys.path",
            "start with `pensieve`, not with `python -m` in the checkout",
        )
    try:
        return Check("kernels", "ok", f"the PyPI package, {importlib.metadata.version('kernels')}")
    except importlib.metadata.PackageNotFoundError:
        return Check("kernels", "fail", f"shadowed by {spec.origin}", "remove that folder from sys.path")


def store(url: str) -> Iterator[Check]:
    """Check the history store: library version, folder or connection. Creates nothing."""
    if url == "memory:":
        yield Check("memory", "note", "history is lost when the server ends", "--store sqlite:///PATH")
    elif url.startswith("sqlite:"):
        yield from _sqlite(Path(url.removeprefix("sqlite:///")))
    elif url.startswith(("redis://", "rediss://")):
        yield _redis(url)
    else:
        where = urlsplit(url).netloc.rpartition("@")[2]
        yield Check("redis", "note", f"{where}: several servers, checked when `pensieve serve` starts")


def _sqlite(path: Path) -> Iterator[Check]:
    good = sqlite3.sqlite_version_info >= OLDEST_SQLITE
    oldest = ".".join(map(str, OLDEST_SQLITE))
    yield Check("sqlite", "ok" if good else "fail", sqlite3.sqlite_version, "" if good else f"needs {oldest}")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    target = path if path.exists() else folder
    if os.access(target, os.R_OK | os.W_OK) and os.access(folder, os.W_OK | os.X_OK):
        yield Check("file", "ok", f"{path}{'' if path.exists() else ' (does not exist yet)'}")
    else:
        yield Check("file", "fail", f"{target} is not writable", "choose another --store sqlite:///PATH")


def _redis(url: str) -> Check:
    parts = urlsplit(url)
    where = f"{parts.hostname}:{parts.port or 6379}"  # never the URL: it may hold a password
    try:
        redis = importlib.import_module("redis")
    except ImportError as error:
        return Check("redis", "fail", f"no client: {error}", "pip install 'pensieve[server]'")
    query = urlencode(
        [pair for pair in parse_qsl(parts.query) if pair[0] != "replicas"]
    )  # our own parameter, unknown to the client library
    client = redis.Redis.from_url(
        parts._replace(query=query).geturl(), socket_timeout=2.0, socket_connect_timeout=2.0
    )
    try:
        info = client.info()
    except redis.RedisError as error:
        return Check("redis", "fail", f"{where}: {error}", "start redis-server, or correct --store")
    finally:
        client.close()
    version = info["redis_version"]
    if not info.get("aof_enabled"):
        fix = "redis-cli config set appendonly yes"
        return Check("redis", "note", f"{where}: {version}, no append-only file: a crash loses history", fix)
    return Check("redis", "ok", f"{where}: {version}, append-only file on")


def model(name: str) -> Iterator[Check]:
    """Check the model's folder or file: architecture, weights, tokenizer, chat template. Downloads nothing."""
    from pensieve.model.arch import ModelError
    from pensieve.model.folder import load_arch
    from pensieve.model.resolve import is_path, resolve_model

    if name != "demo" and not is_path(name) and not user_path(name).exists():
        fix = "pass a folder or a GGUF file, or let `pensieve serve` download it"
        found = "not a folder or file here; other names are resolved when the server starts"
        yield Check(name, "note", found, fix)
        return
    try:
        folder = resolve_model(name)
        arch = load_arch(folder)
    except ModelError as error:
        fix = "pass a model folder of a supported family, a GGUF file, `smollm2` or `demo`"
        yield Check("architecture", "fail", str(error), fix)
        return
    except ImportError as error:
        yield Check("packages", "fail", f"no {error.name}", "pip install 'pensieve[gguf]'")
        return
    found = f"{arch.family}, {arch.num_layers} layers, context {arch.context_limit}, {arch.num_parameters / 1e6:.1f} M"
    yield Check("architecture", "ok", found)
    yield _weights(folder)
    yield from _tokenizer(folder)


def _weights(folder: Path) -> Check:
    if folder.is_file():
        headers = read_gguf(folder).headers
        size = sum(path.stat().st_size for path, _ in headers)
        return Check("weights", "ok", f"{len(headers)} GGUF file(s), {size / GIB:.2f} GiB")

    from pensieve.model.arch import ModelError
    from pensieve.model.folder import weight_files

    try:
        files = weight_files(folder)
    except ModelError as error:
        fix = "download the whole model (only safetensors files are read), or use --load-format dummy"
        return Check("weights", "fail", str(error), fix)
    size = sum(file.stat().st_size for file in files)
    return Check("weights", "ok", f"{len(files)} file(s), {size / GIB:.2f} GiB")


def _tokenizer(folder: Path) -> Iterator[Check]:
    from pensieve.errors import InvalidArgument
    from pensieve.tokenizer.folder import read_folder

    try:
        tokenizer = read_folder(folder)
    except InvalidArgument as error:
        yield Check("tokenizer", "fail", error.message, "download the model's tokenizer files too")
        return
    yield Check("tokenizer", "ok", f"{tokenizer.vocab_size} tokens")
    has_template = tokenizer.template is not None
    fix = "" if has_template else "--chat-template FILE.jinja"
    found = "the model's own" if has_template else "none: turns are concatenated as plain text"
    yield Check("chat template", "ok" if has_template else "note", found, fix)


DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")
OLDEST_TRITON: Final = (3, 4)
OLDEST_CAPABILITY: Final = (8, 0)
"""First NVIDIA architecture with bfloat16 matrix units; the Triton kernels need it."""


def accelerator() -> Iterator[Check]:
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        yield Check("torch", "fail", f"cannot be imported: {error}", "pip install torch==2.13.0")
        return
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    yield Check("torch", "ok", f"{torch.__version__}, {built}, {torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        yield _no_gpu(torch)
        return
    driver = driver_version()
    yield Check("driver", "ok", driver or "version unknown")
    for index in range(torch.cuda.device_count()):
        yield _gpu(torch, index)
    yield from gpu_links(torch)
    yield _triton()
    yield _compiler()
    yield _pinned()


def driver_version(file: Path = DRIVER_FILE) -> str | None:
    """Return the version of the NVIDIA kernel module; None if it is not loaded."""
    try:
        text = file.read_text()
    except OSError:
        return None
    match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return match[1] if match else None


def _no_gpu(torch: Any) -> Check:
    """Explain why there is no GPU."""
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
    return Check("gpu", "note", found, fix)


def _gpu(torch: Any, index: int) -> Check:
    name = torch.cuda.get_device_name(index)
    capability = tuple(torch.cuda.get_device_capability(index))
    free, total = torch.cuda.mem_get_info(index)
    found = (
        f"{name}, compute capability {capability[0]}.{capability[1]}, "
        f"{total / GIB:.0f} GiB, {free / GIB:.0f} GiB free"
    )
    if capability < OLDEST_CAPABILITY:
        return Check(f"gpu {index}", "fail", found, "needs compute capability 8.0; use --device cpu")
    if free < total / 2:
        return Check(f"gpu {index}", "note", found, "other programs use it: see nvidia-smi")
    return Check(f"gpu {index}", "ok", found)


def _triton() -> Check:
    try:
        version = str(importlib.import_module("triton").__version__)
    except ImportError as error:
        return Check("triton", "fail", f"cannot be imported: {error}", "pip install triton")
    old = tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_TRITON
    fix = f"needs {OLDEST_TRITON[0]}.{OLDEST_TRITON[1]}" if old else ""
    return Check("triton", "fail" if old else "ok", version, fix)


def _compiler() -> Check:
    """Check for a C compiler: Triton compiles a small launcher for each kernel."""
    found = next((path for name in ("gcc", "clang", "cc") if (path := shutil.which(name))), None)
    if found is None:
        fix = "install gcc, or set CC to a compiler: Triton's kernels need one"
        return Check("C compiler", "note", "no gcc, clang or cc", fix)
    return Check("C compiler", "ok", found)


def _pinned() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("pinned memory", "ok", "no limit (ulimit -l)")
    found = f"ulimit -l is {soft / 1024:.0f} KiB; CUDA's own pinning usually ignores this limit"
    fix = "if pinning the host tier fails: ulimit -l unlimited, docker run --ulimit memlock=-1"
    return Check("pinned memory", "note", found, fix)


TOPOLOGY_TIMEOUT_S: Final = 10.0
_ESCAPES = re.compile(r"\x1b\[[\d;]*m")
_LINK_KINDS: Final = {
    "PIX": "one PCIe switch",
    "PXB": "PCIe switches",
    "PHB": "PCIe through the CPU",
    "NODE": "PCIe through the CPU",
    "SYS": "PCIe and the link between CPUs",
}
"""Names that ``nvidia-smi topo -m`` gives to paths other than NVLink."""

Pair = tuple[int, int]


def gpu_links(torch: Any) -> Iterator[Check]:
    """Check how the GPUs are connected; no finding if there is only one."""
    count = torch.cuda.device_count()
    if count < 2:
        return
    pairs = list(itertools.combinations(range(count), 2))
    kinds = topology(_matrix())
    by_kind: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_kind[kinds.get(pair, "unknown")].append(pair)
    found = "; ".join(
        f"{_link_name(kind)} between {_format_pairs(linked, pairs)}" for kind, linked in by_kind.items()
    )
    without_access = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if without_access:
        fix = "--tensor-parallel copies through host memory there, slowly: check for an IOMMU or a virtual machine"
        yield Check(
            "gpu links",
            "note",
            f"{found}; no peer access {_format_pairs(without_access, pairs)}",
            fix,
        )
    elif any(kind.startswith("NV") for kind in by_kind):
        yield Check("gpu links", "ok", found)
    else:
        fix = "--tensor-parallel gains little over PCIe; run one server for each GPU unless the model needs several"
        yield Check("gpu links", "note", found, fix)


def topology(matrix: str) -> dict[Pair, str]:
    """Return the link of each pair of GPUs from the output of ``nvidia-smi topo -m``; {} for other text."""
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
            [path, "topo", "-m"], capture_output=True, text=True, timeout=TOPOLOGY_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _link_name(kind: str) -> str:
    nvlink = re.fullmatch(r"NV(\d+)", kind)
    return f"NVLink ({nvlink[1]} links)" if nvlink else _LINK_KINDS.get(kind, f"link type {kind}")


def _format_pairs(some: list[Pair], every: list[Pair]) -> str:
    return "all" if some == every else ", ".join(f"{first}-{second}" for first, second in some)


ANSWER_TIMEOUT_S: Final = 2.0
OWN_METRIC: Final = b"pensieve_build_info"


def port(name: str, address: str) -> Check:
    """Check that a server can listen on the address. A Pensieve server that already does is no problem."""
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
            fix = f"none needed; a second server needs another --{name}"
            return Check(name, "note", f"{address}: a Pensieve server is running there", fix)
        fix = f"stop the program that uses it, or choose another --{name}"
        return Check(name, "fail", f"{address}: {error.strerror or error}", fix)
    return Check(name, "ok", f"{address}{': any free port' if number == 0 else ' is free'}")


def _serves(address: str) -> bool:
    """Whether a Pensieve server answers there, if only to ask for a key. One with TLS is not recognised."""
    from pensieve.client import Client
    from pensieve.errors import PensieveError

    try:
        with Client(address, timeout=ANSWER_TIMEOUT_S, retry_for=0) as client:
            client.server_info()
    except PensieveError as error:
        return error.reason.startswith("CREDENTIAL_")
    return True


def _serves_metrics(address: str) -> bool:
    try:
        with build_opener(ProxyHandler({})).open(
            f"http://{address}/metrics", timeout=ANSWER_TIMEOUT_S
        ) as answer:
            return OWN_METRIC in answer.read(1 << 20)
    except (URLError, OSError, ValueError):
        return False


_DEFAULTS = options.ServeOptions()
_NAME: Final = 24
_NARROW: Final = 60
_COLOUR = {"ok": "green", "note": "yellow", "fail": "red"}


def run_checks(resolved: options.ServeOptions) -> list[Check]:
    is_server = extras.installed("server")
    areas: dict[str, Iterable[Check]] = {
        "system": system(),
        "packages": packages(),
        "accelerator": accelerator() if is_server else (),
        "store": store(resolved.store),
        "model": model(resolved.model) if is_server else (),
        "ports": (port("listen", resolved.listen), port("admin", resolved.admin)),
    }
    return [msgspec.structs.replace(check, area=area) for area, checks in areas.items() for check in checks]


def show(findings: list[Check], console: Console) -> None:
    """Print a paragraph per finding with its fix, and a last line with the verdict.

    On a narrow console a finding wraps below itself.
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
    """Return the finding wrapped to ``width`` columns. Paths and commands are never split: users copy them."""
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
    help=f"Model to check: folder, GGUF file, hub id, `smollm2` or `demo`.  [default: {_DEFAULTS.model}]",
    shell_complete=models,
)
@click.option(
    "--store",
    envvar="PENSIEVE_SERVE_STORE",
    metavar="URL",
    help="History store to check.  [default: as `pensieve serve`]",
)
@click.option(
    "--listen",
    envvar="PENSIEVE_SERVE_LISTEN",
    metavar="HOST:PORT",
    help=f"gRPC address to check.  [default: {_DEFAULTS.listen}]",
)
@click.option(
    "--admin",
    envvar="PENSIEVE_SERVE_ADMIN",
    metavar="HOST:PORT",
    help=f"Admin address to check.  [default: {_DEFAULTS.admin}]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool, **given: str | None) -> None:
    """Check this machine for running a server, and suggest fixes.

    Uses the environment variables of `pensieve serve`, too. Exit code 1 if a problem would keep `pensieve
    serve` with these options from working.
    """
    # Whether an address is safe to listen on is checked by `serve`; here only whether it is free.
    resolved = options.resolve({**given, "insecure-i-know": True}).options
    findings = run_checks(resolved)
    blocking = any(check.state == "fail" for check in findings)
    if as_json:
        report = {"ok": not blocking, "checks": findings}
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2))
    else:
        show(findings, output.stdout())
    sys.exit(1 if blocking else 0)
