"""Parts of transformers are imported without the whole, which takes seconds; the whole may follow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pensieve.demo import MODEL_DIR
from support.sources import ROOT

CODE = """
import sys
from pathlib import Path
from pensieve.tokenizer import ChatTokenizer
ChatTokenizer.from_folder(Path(sys.argv[1]))
assert not {"torch", "transformers"} & sys.modules.keys(), "a front end imports too much"

from pensieve.model.families.parsing import CONFIG_CLASSES, _config_module
from pensieve.model.folder import load_arch
load_arch(Path(sys.argv[1]))
classes = {name: getattr(_config_module(folder), name) for folder, name in CONFIG_CLASSES.values()}
assert not {"transformers", "transformers.models", "transformers.activations"} & sys.modules.keys()

from pensieve.model.families.parsing import transformers_module
generic = transformers_module("tokenization_utils_tokenizers").TokenizersBackend
import transformers
from transformers.activations import ACT2FN
assert all(getattr(transformers, name) is found for name, found in classes.items())
assert transformers.PreTrainedTokenizerFast is generic and "silu" in ACT2FN
assert transformers_module("activations").ACT2FN is ACT2FN
"""


def test_parts_without_the_whole_and_then_the_whole() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", CODE, str(MODEL_DIR)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_version_whose_parts_need_the_whole(tmp_path: Path) -> None:
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("Word = 'from the index'")
    (package / "part.py").write_text("from . import Word")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from pensieve.model.families.parsing import transformers_module\n"
        "assert transformers_module('part').Word == 'from the index'\n"
        "import transformers; assert transformers.Word and transformers.part.Word"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
