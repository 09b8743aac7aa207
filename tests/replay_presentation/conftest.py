"""What the tests of pages share."""

from __future__ import annotations

import pytest

from pensieve.replay.presentation import html
from support.replay.replay_reports import sweep


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what a page says beside its plots, which take a second or two."""
    monkeypatch.setattr(html, "inline_svgs", lambda *_: {})


@pytest.fixture(scope="module")
def sweep_page() -> str:
    """The page of several systems at several loads."""
    return html.page([sweep()])
