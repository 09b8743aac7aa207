"""``python docs/site``: makes a site of the documentation in ``.site``. Nothing is fetched; a warning is an error."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import shutil
import sys
from pathlib import Path

os.environ["DISABLE_MKDOCS_2_WARNING"] = "true"  # versions are pinned: constraints.txt
_MISSING = [name for name in ("mkdocs", "material", "griffe") if importlib.util.find_spec(name) is None]
if _MISSING:
    sys.exit(
        f"docs: {', '.join(_MISSING)} not installed: make setup, or pip install 'pensieve[docs]' -c constraints.txt"
    )

import commands  # noqa: E402
import contract  # noqa: E402
import gfm  # noqa: E402
import sdk  # noqa: E402
import staging  # noqa: E402
from mkdocs.commands.build import build  # noqa: E402
from mkdocs.config import load_config  # noqa: E402
from mkdocs.exceptions import MkDocsException  # noqa: E402

MADE = {
    "reference/rpc.md": contract.page,
    "reference/serve.md": commands.serve_page,
    "reference/commands.md": commands.commands_page,
    "reference/sdk.md": sdk.page,
}


def _named(nav: object) -> set[str]:
    if isinstance(nav, str):
        return {nav}
    inside = nav.values() if isinstance(nav, dict) else nav
    assert not isinstance(inside, str) and hasattr(inside, "__iter__")
    return set().union(*(_named(part) for part in inside))


def main() -> None:
    """Lays the pages out and builds; ends with 1 and mkdocs' own words when a link or an anchor leads nowhere."""
    parser = argparse.ArgumentParser(prog="python docs/site", description=__doc__)
    parser.add_argument("--to", type=Path, default=staging.ROOT / ".site", help="folder of the site")
    parser.add_argument("--pages", type=Path, default=staging.ROOT / "build/docs", help="folder of its pages")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    shutil.rmtree(asked.pages, ignore_errors=True)
    pages = staging.stage(asked.pages)
    for name, make in MADE.items():
        staging.write(asked.pages / name, make())
    config = load_config(
        str(staging.ROOT / "docs/mkdocs.yml"), docs_dir=str(asked.pages.resolve()), site_dir=str(asked.to.resolve()),
        strict=True,
    )  # fmt: skip
    config.mdx_configs.setdefault("toc", {})["slugify"] = gfm.anchor
    rest = [page for page in pages if page not in _named(config.nav)]
    next(part["How to"] for part in config.nav or () if "How to" in part).extend(rest)
    try:
        build(config)
    except MkDocsException as error:
        sys.exit(str(error))
    print(asked.to / "index.html")


if __name__ == "__main__":
    main()
