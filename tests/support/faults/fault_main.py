"""``python -m support.faults.fault_main OPTIONS_JSON``: a whole server on the braked hash engine."""

from __future__ import annotations

import gc
import sys


def main(options: str) -> int:
    """Serve to the end; return the exit status."""
    gc.disable()  # before the imports, as the command does
    from pensieve.cli.environment import silence_grpc

    silence_grpc()  # likewise: a full pipe would block the thread in which gRPC writes
    import msgspec

    from pensieve.options.serve import ServeOptions
    from pensieve.server.app import run
    from support.faults.fault_engine import BUILDER
    from support.service.kept_tokenizer import use_kept_tokenizers

    use_kept_tokenizers()
    return run(msgspec.json.decode(options.encode(), type=ServeOptions), builder=BUILDER)


if __name__ == "__main__":
    status = main(sys.argv[1])
    assert "torch" not in sys.modules, "the front end must not import torch"
    sys.exit(status)
