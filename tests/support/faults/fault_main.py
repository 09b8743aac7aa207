"""``python -m support.faults.fault_main OPTIONS_JSON``: a whole server on the braked hash engine."""

from __future__ import annotations

import sys

import msgspec

from pensieve.options.serve import ServeOptions
from pensieve.server.app import run
from support.faults.fault_engine import BUILDER
from support.service.kept_tokenizer import use_kept_tokenizers

if __name__ == "__main__":
    use_kept_tokenizers()
    status = run(msgspec.json.decode(sys.argv[1].encode(), type=ServeOptions), builder=BUILDER)
    assert "torch" not in sys.modules, "the front end must not import torch"
    sys.exit(status)
