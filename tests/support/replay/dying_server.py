"""A stateless OpenAI stub that dies of its own in the middle of a replay.

python tests/support.replay.dying_server.py PORT PROMPTS
"""

from __future__ import annotations

import os
import sys
import time
from threading import Thread

LAST_WORDS = "device lost: an illegal memory access was encountered"
STATUS = 70


def main(port: int, prompts: int) -> None:
    """Serves ``prompts`` prompts, then ends without a goodbye."""
    from openai_stub import Counting, Stub  # beside this script, when it runs as one

    stub = Stub(Counting(), port)
    Thread(target=stub.serve_forever, daemon=True).start()
    print(f"listening {stub.server_port}", flush=True)
    while len(stub.prompts) < prompts:
        time.sleep(0.01)
    print(LAST_WORDS, flush=True)
    os._exit(STATUS)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
