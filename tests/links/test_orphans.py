"""A server to which processes are left, as to process 1 of a container, waits for them, and for nobody else's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pensieve.server.child import CHILDREN
from pensieve.server.links.process_link import ProcessLink
from support.engine.fake_engine import BUILDER, Script, options
from support.faults import with_helper
from support.processes import alive, children, until
from support.service.server_process import launched

INHERIT = """
import ctypes
PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
"""
"""Processes below this one whose parent ends are left to it: so they are to process 1."""


def test_what_a_killed_engine_leaves_behind_is_no_zombie(tmp_path: Path) -> None:
    with launched(tmp_path, builder=with_helper.BUILDER, begin=INHERIT) as server:
        (engine,) = children(server.process.pid)
        (helper,) = children(engine)
        os.kill(engine, signal.SIGKILL)
        until(lambda: not alive(helper), "the helper outlived its engine")
        until(lambda: not Path(f"/proc/{helper}").exists(), f"{helper} is a zombie")
        assert "signal 9 (killed from outside" in server.stderr, "the server has the status of its own child"
        until(lambda: [alive(pid) for pid in children(server.process.pid)] == [True], "not one engine")


async def test_engines_are_own_children_until_they_have_ended() -> None:
    link = ProcessLink(options(Script()), builder=BUILDER)
    before = set(CHILDREN)
    await link.start()
    assert CHILDREN - before <= set(children(os.getpid())) and len(CHILDREN - before) == 1
    await link.stop()
    assert before == CHILDREN


def run(program: str) -> list[str]:
    """What a program says that inherits processes."""
    done = subprocess.run(
        [sys.executable, "-c", INHERIT + _BEGIN + textwrap.dedent(program)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


_BEGIN = """
import asyncio, contextlib, os, subprocess, sys, time
from pathlib import Path
from pensieve.server.child import CHILDREN
from pensieve.server.operations.housekeeping import reap_orphans

@contextlib.contextmanager
def waited_for(pid):
    CHILDREN.add(pid)
    try:
        yield
    finally:
        CHILDREN.discard(pid)

def orphan(command):
    "Start one whose parent ends at once; its id."
    return int(subprocess.run(["sh", "-c", command + " >/dev/null & echo $!"], stdout=subprocess.PIPE).stdout)

async def gone(pid):
    async with asyncio.timeout(20):
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.01)
"""


def test_the_status_of_an_own_child_is_not_taken() -> None:
    """However long nobody has asked for it, and while others are waited for."""
    said = run("""
        async def main():
            slow = subprocess.Popen(["sh", "-c", "exit 7"])
            CHILDREN.add(slow.pid)
            task = asyncio.create_task(reap_orphans(CHILDREN, 0.05))
            for _ in range(3):
                await gone(orphan("sleep 0.1"))
            quick = await asyncio.create_subprocess_exec("sh", "-c", "exit 5")
            with waited_for(quick.pid):
                await gone(orphan("true"))
                print(await quick.wait())
            print(slow.wait(), sorted(CHILDREN) == [slow.pid])
        asyncio.run(main())
    """)
    assert said == ["5", "7 True"]


@pytest.mark.fault(34)
def test_orphans_are_looked_for_again_when_files_are_free() -> None:
    said = run("""
        import resource
        async def main():
            task = asyncio.create_task(reap_orphans(CHILDREN, 0.05))
            pid = orphan("true")
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            await asyncio.sleep(0.5)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            await gone(pid)
            print(task.done())
        asyncio.run(main())
    """)
    assert said == ["False"]


def test_a_child_of_a_library_has_time_to_be_waited_for() -> None:
    """It is in no list; one interval at least it is left alone."""
    said = run("""
        async def main():
            task = asyncio.create_task(reap_orphans(CHILDREN, 0.5))
            await asyncio.sleep(0.4)
            library = subprocess.Popen(["sh", "-c", "exit 7"])
            await asyncio.sleep(0.4)  # it was seen once
            print(library.wait())
        asyncio.run(main())
    """)
    assert said == ["7"]


def test_running_children_and_orphans_are_left_alone() -> None:
    said = run("""
        async def main():
            task = asyncio.create_task(reap_orphans(CHILDREN, 0.02))
            left = orphan("sleep 0.6")
            await gone(orphan("true"))
            print(Path(f"/proc/{left}").exists(), task.done())
            await gone(left)
        asyncio.run(main())
    """)
    assert said == ["True False"]
