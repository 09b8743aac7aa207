"""The dashboard of Grafana and the alerts of Prometheus ask for what servers tell, and say what to do about it."""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pensieve.client import AsyncClient
from pensieve.core import FinishReason
from pensieve.server.operations.traces import SERVER_FAULTS
from support import metrics_page
from support.prometheus import FOLDER, prometheus, promtool
from support.service.server_process import launched
from support.sources import ROOT, python_files

DASHBOARD = json.loads((ROOT / "deploy/grafana/pensieve.json").read_text())
GROUPS = yaml.load((FOLDER / "rules.yml").read_text(), yaml.CSafeLoader)["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
BY_SERIES = {series: family for family in metrics_page.all_families().values() for series in family.series}
OF_PROMETHEUS = {"instance", "job", "le"}
"""Labels that it adds, and that of a histogram's buckets."""
NEEDS_A_REASON = {"pensieve_refusals_total", "pensieve_step_part_seconds_total"}
"""What a quiet server with the fake engine does not tell: nothing was refused, and its steps have no parts."""


def panels() -> Iterator[tuple[str, str]]:
    """(title, query) of every query of the dashboard."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


QUERIES = [*panels(), *((rule["alert"], rule["expr"]) for rule in RULES)]


def plain(query: str) -> str:
    """A query of the dashboard with values for Grafana's variables."""
    return query.replace("$__rate_interval", "1m").replace("$instance", ".+")


def families_of(query: str) -> set[str]:
    return set(re.findall(r"\b(?:pensieve|process)_\w+|\bup\b", query))


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_queries_name_metrics_and_labels_that_exist(title: str, query: str) -> None:
    assert families_of(query), "a query about nothing of ours"
    labels = set(OF_PROMETHEUS)
    for name in families_of(query) - {"up"}:
        assert name in BY_SERIES, f"{title}: no metric {name}"
        labels |= set(BY_SERIES[name].labels)
    without_texts = re.sub(r'"[^"]*"', '""', query)
    matched = set(re.findall(r"[{,]\s*(\w+)\s*(?:=~|!~|!=|=)", without_texts))
    grouped = {
        name
        for group in re.findall(r"\b(?:by|without) \(([^)]*)\)", without_texts)
        for name in group.replace(" ", "").split(",")
    }
    assert matched | grouped <= labels, f"{title}: {(matched | grouped) - labels}"


def test_values_of_labels_exist() -> None:
    """Outcomes and reasons in matchers are reasons of errors or of finishing; others are what the code writes."""
    reasons = set(re.findall(r"^\| `([A-Z_]+)` \|", (ROOT / "docs/errors.md").read_text(), re.MULTILINE))
    known = {name.lower() for name in reasons | {reason.name for reason in FinishReason}}
    sources = {"device", "host", "recomputed", "new"}
    found = 0
    for title, query in QUERIES:
        for label, values in re.findall(r'\b(outcome|reason|source|tier)\s*(?:=~|!=|=)\s*"([^"]+)"', query):
            for one in values.split("|"):
                assert one in (known if label in ("outcome", "reason") else sources), (
                    f"{title}: {label} {one}"
                )
                found += 1
    assert found > 10
    assert known >= SERVER_FAULTS
    [fails] = [rule["expr"] for rule in RULES if rule["alert"] == "PensieveTurnsFail"]
    counted = set(re.findall(r'outcome=~"([^"]+)"', fails)[0].split("|"))
    assert counted == SERVER_FAULTS - {"history_corrupt", "history_regressed"}, (
        "those two have alerts of their own"
    )


def test_every_alert_has_a_runbook() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    headings = re.findall(r"^### (\w+)$", page, re.MULTILINE)
    assert headings == [rule["alert"] for rule in RULES], (
        "one section for each alert, in the order of the rules"
    )
    for rule in RULES:
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("page", "ticket")
        section = page.split(f"### {rule['alert']}\n")[1].split("\n### ")[0]
        assert "**First:**" in section, f"{rule['alert']}: what to do first?"


def test_runbooks_quote_what_the_log_says() -> None:
    sources = " ".join((ROOT / path).read_text() for path in python_files("pensieve", "store"))
    spans = re.findall(
        r"`([a-z]+(?: [a-z]+){2,})`", (ROOT / "docs/operations.md").read_text().replace("\n", " ")
    )
    quoted = [span for span in spans if not span.startswith("pensieve ")]
    assert len(quoted) >= 4
    assert [span for span in quoted if span.lower() not in sources.lower()] == []


def test_every_alert_is_shown_firing_and_not_firing() -> None:
    cases = yaml.load((FOLDER / "rules_test.yml").read_text(), yaml.CSafeLoader)["tests"]
    fires, rests = set(), set()
    for case in cases:
        for expected in case["alert_rule_test"]:
            (fires if expected["exp_alerts"] else rests).add(expected["alertname"])
    assert fires == rests == {rule["alert"] for rule in RULES}


@pytest.mark.promtool
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "rules.yml"),
        ("test", "rules", "rules_test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_agrees(arguments: tuple[str, ...]) -> None:
    *words, name = arguments
    done = promtool(*words, str(FOLDER / name))
    assert done.returncode == 0, done.stdout + done.stderr


def test_panels_lie_beside_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


@pytest.mark.promtool
@pytest.mark.timeout(240)
async def test_every_query_has_an_answer_from_a_real_server(tmp_path: Path) -> None:
    """A server, and a Prometheus with the deployed files that scrapes it: each panel shows something."""
    with launched(tmp_path / "server", http="127.0.0.1:0", tenant_metrics=True) as server:
        async with AsyncClient(server.grpc) as client:
            chat = await client.create_session()
            await chat.send("hello", max_output_tokens=4)
            await chat.warm()
        await asyncio.to_thread(_get, f"http://{server.http}/v1/models")
        page = await asyncio.to_thread(_get, f"http://{server.admin}/metrics")
        lint = promtool("check", "metrics", text=page)
        assert lint.returncode == 0, lint.stdout + lint.stderr

        with prometheus(tmp_path / "prometheus", [server.admin], "200ms") as asked:
            unanswered = {query for _, query in QUERIES if not families_of(query) & NEEDS_A_REASON}
            alerts = {rule["expr"] for rule in RULES}
            until = time.monotonic() + 120
            while unanswered:
                for query in list(unanswered):
                    found = await asyncio.to_thread(asked.ask, "query", query=plain(query))
                    # An alert's query that finds nothing is good news.
                    if query in alerts or found["result"]:
                        unanswered.discard(query)
                assert time.monotonic() < until, f"no data for {sorted(unanswered)}"
                await asyncio.sleep(0.1)
            groups = asked.ask("rules")["groups"]
            assert {rule["name"] for group in groups for rule in group["rules"]} == {
                r["alert"] for r in RULES
            }
            [target] = asked.ask("targets")["activeTargets"]
            assert target["health"] == "up" and target["labels"]["job"] == "pensieve"


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
    return text
