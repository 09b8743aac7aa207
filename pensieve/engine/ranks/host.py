"""Main of a rank process: ``python -P -m pensieve.engine.ranks.host --rank N …``.

It inherits the ring (``--ring``) and the memory file where the ranks meet (``--meeting``), and reads its
``EngineOptions`` from stdin. Like an engine it prints the cause of a failure as the last line on stderr,
exits with status 1, and leaves signals that a terminal sends to the process group to the front end. The
kernel kills it when the engine's process is gone; the process asks for that before it imports torch, which
takes seconds.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import time

import click
import msgspec

from pensieve.config import EngineOptions
from pensieve.engine.process.host import FAILURE_PREFIX, REFUSED, settle_collector
from pensieve.engine.ranks.supervisor import FAILURE_GRACE_S
from pensieve.lifeline import die_with_parent, leave_signals_to_parent
from pensieve.logs import log_options
from pensieve.model.arch import ModelError

log = logging.getLogger("pensieve.engine.ranks.host")  # Also when this module is __main__.


def serve(rank: int, device: str, ring: int, meeting: int, options: EngineOptions) -> None:
    """Follow rank 0 until it stops. Propagates every exception."""
    gc.disable()  # as the host of rank 0 does, until the worker is built
    # Imported here because they need torch.
    from pensieve.engine.ranks.collectives import RankLost, join
    from pensieve.engine.ranks.leader import follow, spin_seconds
    from pensieve.engine.ranks.ring import RingReader, SharedRing
    from pensieve.engine.worker.torch_worker import build_worker

    gc.freeze()
    ranks = options.tensor_parallel
    try:
        with contextlib.closing(join(device, rank, meeting, options)) as collective:
            reader = RingReader(SharedRing(ring, ranks - 1), rank - 1, spin_s=spin_seconds(device))
            worker = build_worker(options, collective)
            settle_collector()
            gc.enable()
            follow(reader, worker)
            worker.close()
    except RankLost:
        # The lost rank has printed the cause, or was killed. The engine may be about to learn of it and ends
        # all ranks: until then no other rank should print last words.
        time.sleep(FAILURE_GRACE_S)
        raise


@click.command()
@click.option("--rank", type=int, required=True)
@click.option("--parent", type=int, required=True)
@click.option("--device", required=True)
@click.option("--ring", type=int, required=True)
@click.option("--meeting", type=int, required=True)
@log_options
def main(rank: int, parent: int, device: str, ring: int, meeting: int) -> None:
    """Process of one rank of an engine; started by the engine, not by hand."""
    leave_signals_to_parent()
    if not die_with_parent(parent):
        sys.exit(0)
    status = 0
    try:
        serve(
            rank, device, ring, meeting, msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineOptions)
        )
    except Exception as error:
        # The messages of these errors contain numbers and advice; for any other error the traceback matters.
        expected = isinstance(error, ModelError | ValueError)
        if not expected:
            log.exception("rank %d failed", rank)
        name = "" if expected else f"{type(error).__name__}: "
        why = " ".join(f"{name}{error}".split())
        print(f"{FAILURE_PREFIX}rank {rank}: {why}", file=sys.stderr, flush=True)
        status = REFUSED if expected else 1
    # Everything has been released, and finalising the interpreter with torch takes as long as a front end
    # waits. After a failure the other ranks would notice the exit before the engine learns of the cause.
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
