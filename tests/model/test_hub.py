"""Models of a hub: folders and GGUF files, by quantisation, against a stand-in for it on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pensieve.model.arch import ModelError
from pensieve.model.resolve import _gguf_files
from support.engine.checkpoints import tiny_checkpoint
from support.gguf_files import write_gguf
from support.hub import StandInHub

SCRIPT = """
import sys
from pensieve.model.arch import ModelError
from pensieve.model.resolve import resolve_model
for name in sys.argv[1:]:
    try:
        print(resolve_model(name))
    except ModelError as error:
        print("refused:", error)
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandInHub]:
    folder = tmp_path_factory.mktemp("hub")
    model = tiny_checkpoint("qwen3", folder, hidden_size=64, intermediate_size=64)
    files = {
        quant: write_gguf(folder / f"{quant}.gguf", model, quant=quant).read_bytes()
        for quant in ("F16", "Q8_0", "Q4_1")
    }
    hub = StandInHub(
        {
            "org/quants": {f"Tiny-{quant}.gguf": data for quant, data in files.items()}
            | {"config.json": b"{}"},
            "org/one": {"tiny.Q8_0.gguf": files["Q8_0"], "README.md": b"", "mmproj-F16.gguf": b"none"},
            "org/folder": {
                "config.json": (model / "config.json").read_bytes(),
                "model.safetensors": (model / "model.safetensors").read_bytes(),
            },
            "org/broken": {"tiny-Q8_0.gguf": files["Q8_0"][:20_000]},
            "org/nothing": {"README.md": b"words"},
        }
    )
    with hub.serve():
        yield hub


def resolve(hub: StandInHub, home: Path, *names: str, url: str = "") -> list[str]:
    """What each name leads to, in a process of its own: the library reads its variables when it is imported."""
    environment = os.environ | {"HF_ENDPOINT": url or hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, *names],
        env=environment, capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def test_names_of_models(hub: StandInHub, tmp_path: Path) -> None:
    found = resolve(
        hub, tmp_path, "org/quants:Q4_1", "org/quants:q8_0", "hf.co/org/quants:F16", "https://hf.co/org/one",
        "org/one:tiny.Q8_0.gguf", "org/folder", "hf.co/org/folder",
    )  # fmt: skip
    names = ["Tiny-Q4_1.gguf", "Tiny-Q8_0.gguf", "Tiny-F16.gguf", "tiny.Q8_0.gguf", "tiny.Q8_0.gguf"]
    assert [Path(path).name for path in found[:5]] == names
    assert all(Path(path).is_file() for path in found[:5])
    assert found[5] == found[6] and (Path(found[5]) / "model.safetensors").is_file()
    assert hub.fetched.count("Tiny-Q8_0.gguf") == 1 and "mmproj-F16.gguf" not in hub.fetched
    # What is here serves without the hub.
    away = resolve(hub, tmp_path, "org/quants:Q4_1", "org/quants:Q5_0", "org/one", url="http://127.0.0.1:9")
    assert away[::2] == [found[0], found[3]]
    assert away[1].startswith("refused: org/quants:Q5_0: not here, and the hub cannot be reached (")


def test_what_is_not_there_is_one_line_and_leaves_nothing(hub: StandInHub, tmp_path: Path) -> None:
    refused = {
        "org/quants:Q5_K_M": "org/quants:Q5_K_M: no quantisation Q5_K_M there; the repository has F16, Q4_1, Q8_0",
        "org/quants": "several GGUF files there; the repository has F16, Q4_1, Q8_0: name one behind a colon",
        "org/nothing:Q8_0": "no quantisation Q8_0 there; the repository has no GGUF file",
        "org/folder:Q8_0": "no quantisation Q8_0 there; the repository has no GGUF file",
        "hf.co/org/missing:Q8_0": "hf.co/org/missing:Q8_0: not here, and the hub refused it: ",
        "org/broken:Q8_0": "is cut short",
        "org/nothing": "org/nothing: has neither a model folder nor a GGUF file",
        "a b:Q8_0": "a b:Q8_0: neither a folder here nor a hub id",
    }
    lines = resolve(hub, tmp_path, *refused)
    assert len(lines) == len(refused)
    for line, message in zip(lines, refused.values(), strict=True):
        assert line.startswith("refused: ") and message in line
    (away,) = resolve(hub, tmp_path, "org/quants:Q8_0", url="http://127.0.0.1:9")
    assert away.startswith("refused: org/quants:Q8_0: not here, and the hub cannot be reached (")


def test_a_download_that_breaks_off(hub: StandInHub, tmp_path: Path) -> None:
    hub.short = True
    try:
        (line,) = resolve(hub, tmp_path, "org/quants:Q8_0")
    finally:
        hub.short = False
    assert line.startswith("refused: org/quants:Q8_0: not here, and the hub cannot be reached (")
    assert [path for path in tmp_path.rglob("*") if path.suffix in (".gguf", ".incomplete")] == []
    (path,) = resolve(hub, tmp_path, "org/quants:Q8_0")
    assert Path(path).read_bytes() == hub.repositories["org/quants"]["Tiny-Q8_0.gguf"]


@pytest.mark.parametrize(
    ("files", "quant", "chosen"),
    [
        (["a-Q4_K_M.gguf", "a-Q8_0.gguf"], "", ["a-Q4_K_M.gguf"]),
        (["a-Q8_0-00002-of-00002.gguf", "a-Q8_0-00001-of-00002.gguf"], "q8_0",
         ["a-Q8_0-00001-of-00002.gguf", "a-Q8_0-00002-of-00002.gguf"]),
        (["BF16/a-BF16.gguf", "a-UD-IQ2_XXS.gguf"], "bf16", ["BF16/a-BF16.gguf"]),
        (["BF16/a-BF16.gguf", "a-UD-IQ2_XXS.gguf"], "UD-IQ2_XXS", ["a-UD-IQ2_XXS.gguf"]),
        (["model-fp16.gguf", "model.gguf"], "fp16", ["model-fp16.gguf"]),
        (["model-fp16.gguf", "model.gguf"], "model.gguf", ["model.gguf"]),
        (["ggml-model-i2_s.gguf"], "", ["ggml-model-i2_s.gguf"]),
        (["model.safetensors", "a-Q8_0.gguf", "config.json"], "", []),
        (["config.json"], "", []),
    ],
)  # fmt: skip
def test_the_files_that_a_name_means(files: list[str], quant: str, chosen: list[str]) -> None:
    assert _gguf_files("org/repo", files, quant) == chosen


def test_two_models_in_one_repository() -> None:
    with pytest.raises(
        ModelError, match=r"several files are Q8_0; name one of a-Q8_0\.gguf, b-Q8_0\.gguf behind"
    ):
        _gguf_files("org/repo:Q8_0", ["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0")
