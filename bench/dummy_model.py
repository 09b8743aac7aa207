"""Makes a model folder without weights: a named shape as config.json, and a tokenizer that works without downloads.

    python bench/dummy_model.py llama-2-13b-gqa10 FOLDER

``llama-2-13b-gqaN`` and ``tiny-llama-gqaN`` take any number N of KV heads that divides the query heads (40 and 8).

For ``pensieve serve --model FOLDER --load-format dummy``. The tokenizer is the demo model's: it knows fewer ids than
the model has. Ids that it does not know are valid input and valid output; their text is empty.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import click

from pensieve import demo

SHAPES = {path.stem: path for path in sorted(Path(__file__).with_name("shapes").glob("*.json"))}
"""config.json by name. Llama 2 13B with 10 KV heads and a longer context is the model of the EuroSys paper §6."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def shape_config(name: str) -> dict[str, Any]:
    """config.json of a named shape. Raises ValueError on a name that stands for none."""
    if name in SHAPES:
        return json.loads(SHAPES[name].read_text(encoding="utf-8"))
    family, _, heads = name.rpartition("-gqa")
    kin = [path for known, path in SHAPES.items() if known.rpartition("-gqa")[0] == family and family]
    if not kin or not re.fullmatch(r"[1-9]\d*", heads):
        raise ValueError(f"{name!r} is no shape: {', '.join(SHAPES)}, and any number after -gqa")
    config = json.loads(kin[0].read_text(encoding="utf-8"))
    if config["num_attention_heads"] % int(heads):
        raise ValueError(
            f"{name!r}: {heads} KV heads do not divide {config['num_attention_heads']} query heads"
        )
    return config | {"num_key_value_heads": int(heads)}


def make(name: str, folder: Path, context_limit: int = 0) -> Path:
    """Write the folder; ``context_limit`` replaces the shape's own. Raises ValueError on an unknown shape."""
    config = shape_config(name)
    if context_limit:
        config["max_position_embeddings"] = context_limit
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    for file in TOKENIZER_FILES:
        shutil.copyfile(Path(demo.__file__).parent / "model" / file, folder / file)
    return folder


@click.command()
@click.argument("shape")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--context-limit", type=click.IntRange(min=0), default=0, metavar="N",
              help="Positions; default: the shape's own.")  # fmt: skip
def main(shape: str, folder: Path, context_limit: int) -> None:
    """Make FOLDER for the model SHAPE."""
    try:
        click.echo(make(shape, folder, context_limit))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="SHAPE") from error


if __name__ == "__main__":
    main()
