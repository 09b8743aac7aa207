"""The documentation as a site: it builds without a warning, whole and without a network; and its snippets are good."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

import pensieve.client
from pensieve.cli.main import SUBCOMMANDS, cli
from pensieve.options.table import OPTIONS
from pensieve.v1 import pensieve_pb2
from support.sources import ROOT, files

PAGES = [path for path in files() if path.parent == Path("docs") and path.suffix == ".md"]
DOCUMENTS = [
    path
    for path in files()
    if path.suffix == ".md" and path.name != "CHANGELOG.md" and not path.is_relative_to("bench/results")
]
"""Pages whose snippets hold today; what was run for a result, and what changed, was written in its own time."""
GENERATOR = ROOT / "docs/site"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A warning of mkdocs, such as a link or an anchor that leads nowhere, ends the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(GENERATOR), "--to", str(folder / "site"), "--pages", str(folder / "pages")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "site"


def ids(site: Path, page: str) -> set[str]:
    """The anchors of a page."""
    return set(re.findall(r'\bid="([^"]+)"', (site / page).read_text(encoding="utf-8")))


@pytest.mark.timeout(150)
def test_every_page_is_in_the_navigation(site: Path) -> None:
    front = (site / "index.html").read_text(encoding="utf-8")
    linked = set(
        re.findall(r'class="md-nav__link"[^>]*href="([^"]+)"|href="([^"]+)"[^>]*class="md-nav__link"', front)
    )
    named = {one for pair in linked for one in pair if one} | {"index.html"}
    for page in PAGES:
        place = "contents.html" if page.name == "README.md" else f"{page.stem}.html"
        assert (site / place).is_file() and place in named, f"{page} is not in the navigation of the site"


def test_the_navigation_names_pages_once() -> None:
    config = yaml.safe_load((ROOT / "docs/mkdocs.yml").read_text(encoding="utf-8"))
    named = re.findall(r"[\w/-]+\.md", str(config["nav"]))
    assert len(named) == len(set(named))


def test_nothing_is_fetched(site: Path) -> None:
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        text = path.read_text(encoding="utf-8")
        fetched = re.findall(
            r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?((?:https?:)?//[^"'\s>]+)""", text
        )
        fetched += re.findall(r"""<link[^>]*\shref=["']?((?:https?:)?//[^"'\s>]+)""", text)
        fetched += re.findall(r"""(?:url\(|@import\s)["']?((?:https?:)?//[^"')\s]+)""", text)
        assert fetched == [], path.relative_to(site)
        assert "unpkg.com" not in text, path.relative_to(site)


def test_calls_and_messages_have_their_places(site: Path) -> None:
    text, anchors = (site / "reference/rpc.html").read_text(encoding="utf-8"), ids(site, "reference/rpc.html")
    file = pensieve_pb2.DESCRIPTOR
    for service in file.services_by_name.values():
        for call in service.methods:
            assert f"<strong>{call.name}</strong>" in text
    for name, message in file.message_types_by_name.items():
        assert name.lower() in anchors
        for field in message.fields:
            assert f"<code>{field.name}</code> = {field.number}" in text
    assert {name.lower() for name in file.enum_types_by_name} <= anchors
    assert "so that a proxy can route on the body alone" in text, "comments of the contract"


def test_options_and_commands_have_their_places(site: Path) -> None:
    options = (site / "reference/serve.html").read_text(encoding="utf-8")
    for option in OPTIONS:
        assert re.search(rf"--(\[no-\])?{option.name}\b", options), option.name
    anchors = ids(site, "reference/commands.html")
    assert {f"pensieve-{name}" for name in ("serve", *SUBCOMMANDS)} <= anchors
    assert "pensieve-store-check" in anchors


def test_the_sdk_has_its_places(site: Path) -> None:
    anchors = ids(site, "reference/sdk.html")
    assert {name.lower() for name in pensieve.client.__all__} <= anchors
    for owner in (pensieve.client.Client, pensieve.client.Session, pensieve.client.AsyncSession):
        methods = {
            name for name in vars(owner) if not name.startswith("_") and callable(getattr(owner, name))
        }
        assert {f"{owner.__name__}{name}".lower() for name in methods} <= anchors


def test_lists_and_tables_are_as_github_reads_them() -> None:
    spec = importlib.util.spec_from_file_location("site_gfm", GENERATOR / "gfm.py")
    assert spec is not None and spec.loader is not None
    gfm = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gfm)
    assert gfm.to_python_markdown("| `a \\| b` |\n|---|\n") == "| `a | b` |\n|---|\n"
    page = (
        "Such are:\n* one,\n  over two lines:\n  - inner\n* two\n| a |\n|---|\n| 1 |\n## Next\ntext\n"
        "```\n* kept\n## kept\n```\n"
    )
    assert gfm.to_python_markdown(page) == (
        "Such are:\n\n* one,\n    over two lines:\n    - inner\n* two\n\n| a |\n|---|\n| 1 |\n\n## Next\n\ntext\n"
        "```\n* kept\n## kept\n```\n"
    )


def blocks(page: Path, *languages: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^( *)```(\w+)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return [
        re.sub(rf"^{pad}", "", code, flags=re.MULTILINE) for pad, name, code in found if name in languages
    ]


@pytest.mark.parametrize("page", DOCUMENTS, ids=str)
def test_snippets_of_python_compile(page: Path) -> None:
    for code in blocks(page, "python", "py"):
        compile(code, str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("page", DOCUMENTS, ids=str)
def test_commands_in_snippets_take_these_options(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command line is read as the shell's would be; then nothing runs."""
    monkeypatch.setattr(
        click.Command, "invoke", lambda self, context: None
    )  # groups have their own, which dispatches
    for code in blocks(page, "console", "bash", "sh"):
        for line in re.sub(r"\\\n", " ", code).splitlines():
            command = re.search(r"(?:^\$ |&& |[\s(])pensieve ([a-z].*)", line)
            if line.startswith("$ ") and command:
                words = shlex.split(re.split(r" [|;&<>]", command[1])[0], comments=True)
                try:
                    cli.main(words, prog_name="pensieve", standalone_mode=False)
                except click.MissingParameter as error:
                    raise AssertionError(f"{page}: {line}: {error.format_message()}") from error
                except click.BadParameter:
                    pass  # a value such as FILE, which stands for one
                except click.UsageError as error:
                    raise AssertionError(f"{page}: {line}: {error.format_message()}") from error
