"""Builds a target of ``deploy/Dockerfile`` without Docker, starts it as an orchestrator would, and talks to it.

    python deploy/image.py                 # or --target cuda
    python deploy/image.py --volume ~/wheels:/wheels:ro --volume pip.conf:/etc/pip.conf:ro

The steps are the Dockerfile's: buildah runs them, each in a chroot. The image that it begins with is made by
debootstrap, as Debian's own is. What comes out is started with its root mounted read-only, as its own user without
capabilities, as process 1 of its own process, mount and network namespaces, with /tmp and the volume as all that can be
written. Needs root, buildah, debootstrap, and the SDK in the Python that runs it. Ends with 0 and a line for each thing
that held.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pensieve.client import Client

ROOT = Path(__file__).parents[1]
BASE = "localhost/debian:bookworm-slim"
START_LIMIT_S = 180.0
COMPILED = """
import sysconfig, tempfile
from triton.runtime.build import compile_module_from_src
source = '#include <Python.h>\\n' \
    'static struct PyModuleDef m = {PyModuleDef_HEAD_INIT, "probe", 0, -1, 0};\\n' \
    'PyMODINIT_FUNC PyInit_probe(void) { return PyModule_Create(&m); }\\n'
print(compile_module_from_src(source, "probe").__file__)
"""
"""What Triton does for each of its kernels: it compiles C against Python's headers, and imports what came out."""


def run(*command: str | Path) -> str:
    """What a command prints; its errors go to this program's."""
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def said(what: str) -> None:
    print(f"ok: {what}", flush=True)


def build(target: str, volumes: list[str]) -> str:
    """The name of the image."""
    if BASE not in run("buildah", "images", "--format", "{{.Name}}:{{.Tag}}"):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["debootstrap", "--variant=minbase", "bookworm", folder], check=True)
            container = run("buildah", "from", "scratch")
            run("buildah", "add", "-q", container, folder, "/")
            run("buildah", "commit", "-q", "--rm", container, BASE)
    name = f"localhost/pensieve:{target}"
    mounted = [part for volume in volumes for part in ("--volume", volume)]
    command = [
        "buildah",
        "bud",
        "--format",
        "docker",
        "--isolation",
        "chroot",
        "--layers",
        "--build-arg",
        f"BASE={BASE}",
        *mounted,
    ]
    command += ["--target", target, "--tag", name, "--file", str(ROOT / "deploy/Dockerfile"), str(ROOT)]
    subprocess.run(command, check=True)
    said(f"{name} was built by the Dockerfile's steps")
    return name


class Image:
    """An image's files and what its configuration says. The names are Docker's."""

    def __init__(self, name: str, root: Path) -> None:
        self.root = root
        self.config: dict[str, Any] = json.loads(run("buildah", "inspect", "--type", "image", name))[
            "Docker"
        ]["config"]
        self.user, _, self.group = self.config["User"].partition(":")
        assert int(self.user) > 0 and int(self.group) > 0
        (self.volume,) = self.config["Volumes"]

    def command(self, volume: Path, command: list[str]) -> list[str]:
        """A command in there, as process 1."""
        inside = shlex.quote(str(self.root))
        as_user = ["chroot", f"--userspec={self.user}:{self.group}", "--groups=", str(self.root)]
        as_user += [
            "/usr/bin/setpriv",
            "--pdeathsig=KILL",
            "--no-new-privs",
            "--inh-caps=-all",
            "--ambient-caps=-all",
        ]
        as_user += ["/usr/bin/env", "-i", "-C", self.config["WorkingDir"], *self.config["Env"]]
        script = f"""
            mount --bind {inside} {inside}
            mount --bind {shlex.quote(str(volume))} {inside}{self.volume}
            mount -t tmpfs -o nosuid,nodev,noexec,mode=1777 tmpfs {inside}/tmp
            mount -t proc proc {inside}/proc
            mount --rbind /dev {inside}/dev
            mount -o remount,bind,ro {inside}
            exec {shlex.join([*as_user, *command])}"""
        # Whoever is killed, what it has started goes with it.
        dies = ["setpriv", "--pdeathsig=KILL"]
        return [*dies, "unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", script]

    def ask(self, volume: Path, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command beside the server, on the same network and volume."""
        return subprocess.run(
            self.command(volume, list(command)), capture_output=True, text=True, timeout=120, check=False
        )

    @contextlib.contextmanager
    def serving(self, volume: Path) -> Iterator[subprocess.Popen[str]]:
        """The image's own entry point and command, from its ready line on."""
        command = self.command(volume, [*self.config["Entrypoint"], *self.config["Cmd"]])
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                began, line = time.monotonic(), ""
                while not line.startswith("ready "):
                    assert process.stdout is not None
                    line = process.stdout.readline()
                    assert line and time.monotonic() - began < START_LIMIT_S, "the server did not start"
                said(f"it serves after {time.monotonic() - began:.1f} s: {line.strip()}")
                yield process
            finally:
                if process.poll() is None:
                    os.kill(first(process), signal.SIGTERM)


def first(process: subprocess.Popen[str]) -> int:
    """Process 1 of the image, by its number out here."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


def check(image: Image, volume: Path, *, compiles: bool) -> None:
    port = re.search(r":(\d+)$", image.config["Cmd"][image.config["Cmd"].index("--listen") + 1])
    assert port is not None
    address = f"127.0.0.1:{port[1]}"
    with image.serving(volume) as server:
        test = image.config["Healthcheck"]["Test"]
        assert test[0] == "CMD"
        healthy = image.ask(volume, *test[1:])
        assert healthy.returncode == 0, healthy.stderr
        said("HEALTHCHECK says yes")
        status = Path(f"/proc/{first(server)}/status").read_text()
        assert re.search(rf"^Uid:\s+{image.user}\s", status, re.MULTILINE), status
        assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE), status
        written = image.ask(volume, "touch", "/probe", "/etc/probe", "/opt/pensieve/probe", "/usr/bin/probe")
        assert written.stderr.count("Read-only file system") == 4, written.stderr
        said(f"user {image.user} without capabilities, on a root that takes no writes")
        with Client(address) as client:
            chat = client.create_session()
            turn = chat.send("My name is Ada. What is my name?", max_output_tokens=24)
            assert turn.text
            said(f"a turn was answered: {turn.text!r}")
            stream = chat.stream("Tell me more.", max_output_tokens=64, ignore_eos=True)
            next(stream)
            os.kill(first(server), int(getattr(signal, image.config["StopSignal"])))
            last = stream.finish()
            assert last.usage.output_tokens == 64
        assert server.wait(60) == 0
        said("a stream that ran went on to its end when it was told to stop, and the exit status is 0")
    with image.serving(volume), Client(address) as client:
        again = client.session(chat.name).send("And now?", max_output_tokens=8)
        assert again.revision > last.revision
        said("another container on the same volume goes on with the session")
    if compiles:
        compiled = image.ask(volume, "python", "-c", COMPILED)
        assert compiled.returncode == 0, compiled.stderr
        assert compiled.stdout.startswith(f"{image.volume}/cache/triton/"), compiled.stdout
        said(f"Triton compiles C into {compiled.stdout.strip()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--volume", action="append", default=[], help="for the build: SOURCE:PLACE[:ro]")
    parser.add_argument("--started", metavar="IMAGE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.started is None:
        name = build(arguments.target, arguments.volume)
        again = [sys.executable, __file__, "--target", arguments.target, "--started", name]
        sys.exit(subprocess.run(["unshare", "--net", "--mount", *again], check=False).returncode)
    run("ip", "link", "set", "lo", "up")
    container = run("buildah", "from", "--pull-never", arguments.started)
    try:
        image = Image(arguments.started, Path(run("buildah", "mount", container)))
        with tempfile.TemporaryDirectory() as folder:
            volume = Path(folder) / "volume"
            volume.mkdir(mode=0o700)
            os.chown(volume, int(image.user), int(image.group))
            check(image, volume, compiles=arguments.target == "cuda")
    finally:
        run("buildah", "rm", container)


if __name__ == "__main__":
    main()
