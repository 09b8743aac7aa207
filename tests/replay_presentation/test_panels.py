"""Which reports are drawn together, and which of their targets are one system."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from pensieve.replay.presentation.curves import Panel, panels
from support.replay.replay_reports import first_version, sweep

Report = dict[str, Any]


def only(reports: list[Report], names: list[str]) -> Panel:
    (panel,) = panels(reports, names)
    assert panel.title == ""
    return panel


def of_model(report: Report, model: str) -> Report:
    for summary in report["targets"]:
        summary["details"]["model"] = model
    return report


def test_reports_that_differ_in_the_load_only_make_one_curve() -> None:
    slow, fast = first_version(1.0), first_version(3.0)
    curves = only([fast, slow], ["fast", "slow"]).curves
    assert [entry.rate for entry in curves["Pensieve"]] == [1.0, 3.0]


def test_a_file_per_system_is_one_picture() -> None:
    together = sweep({"Pensieve": 8.0, "vLLM": 5.0})
    apart = [sweep({name: capacity}) for name, capacity in (("Pensieve", 8.0), ("vLLM", 5.0))]
    of_model(apart[1], "/models/tiny")  # its server names the folder, Pensieve the last part of it
    found, expected = only(apart, ["a", "b"]), only([together], ["c"])
    assert found.points == expected.points and list(found.curves) == ["Pensieve", "vLLM"]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("pensieve serve --listen 127.0.0.1:50051", "pensieve serve --listen 127.0.0.1:50052", True),
        (
            "CUDA_VISIBLE_DEVICES=0 vllm serve m --port 8000",
            "CUDA_VISIBLE_DEVICES=3 vllm serve m --port 8003",
            True,
        ),
        ("vllm serve m --max-num-seqs 64", "vllm serve m --max-num-seqs 128", False),
    ],
)
def test_where_a_server_ran_does_not_tell_it_apart(one: str, other: str, same: bool) -> None:
    slow, fast = first_version(1.0), first_version(3.0)
    slow["targets"][0]["details"]["started"], fast["targets"][0]["details"]["started"] = one, other
    curves = only([slow, fast], ["a", "b"]).curves
    assert list(curves) == (["Pensieve"] if same else ["Pensieve (a)", "Pensieve (b)"])


def test_reports_of_the_same_load_are_compared() -> None:
    before, after = first_version(), first_version()
    assert list(only([before, after], ["a", "b"]).curves) == ["Pensieve (a)", "Pensieve (b)"]


@pytest.mark.parametrize("key", ["machine", "versions"])
def test_another_machine_or_version_is_another_curve(key: str) -> None:
    slow, fast = first_version(1.0), first_version(3.0)
    fast[key] |= {"cpu": "x"} if key == "machine" else {"pensieve": "9"}
    assert list(only([slow, fast], ["a", "b"]).curves) == ["Pensieve (a)", "Pensieve (b)"]


def test_details_tell_apart_too_and_other_names_stay() -> None:
    one = sweep({"Pensieve": 8.0, "stub": 2.0}, (1.0,))
    two = copy.deepcopy(sweep({"Pensieve": 8.0}, (2.0,)))
    two["targets"][0]["details"]["serve"] = "--no-host-cache"
    assert list(only([one, two], ["a", "b"]).curves) == ["Pensieve (a)", "stub", "Pensieve (b)"]


def test_another_workload_is_another_panel() -> None:
    base, longer, slower, cut = (first_version() for _ in range(4))
    longer["dataset"] = {"name": "other.json", "sha256": "11"}
    slower["options"]["arrivals"]["think_time_s"] = 60.0
    cut["workload"] |= {"cut_conversations": 2, "context_limit": 100}
    found = panels([base, longer, slower, cut], ["a", "b", "c", "d"])
    assert [list(panel.curves) for panel in found] == [["Pensieve"]] * 4, "names repeat in other panels"
    titles = [panel.title for panel in found]
    assert titles == [
        "chat<b>.json, tiny, think_time_s 0.5",
        "other.json, tiny, think_time_s 0.5",
        "chat<b>.json, tiny, think_time_s 60",
        "chat<b>.json, tiny, context_limit 100, think_time_s 0.5",
    ]


def test_files_of_one_name_are_told_by_their_reports() -> None:
    one, two = first_version(), first_version()
    two["dataset"]["sha256"] = "other lengths"
    titles = [panel.title for panel in panels([one, two], ["a", "b"])]
    assert titles == ["chat<b>.json, tiny (a)", "chat<b>.json, tiny (b)"]


def test_a_built_in_workload_is_one_whatever_was_drawn() -> None:
    slow, fast = first_version(1.0), first_version(3.0)
    slow["dataset"], fast["dataset"] = ({"name": "sharegpt", "sha256": text} for text in ("seed 1", "seed 2"))
    assert list(only([slow, fast], ["a", "b"]).curves) == ["Pensieve"]


def test_another_model_is_another_panel() -> None:
    small, large = first_version(), of_model(first_version(), "large")
    titles = [panel.title for panel in panels([small, large], ["a", "b"])]
    assert titles == ["chat<b>.json, tiny", "chat<b>.json, large"]
    both = sweep({"Pensieve": 8.0, "stub": 2.0}, (1.0,))
    both["targets"][1]["details"]["model"] = "large"  # the two targets of one run name it differently
    assert len(panels([small, large, both], ["a", "b", "c"])) == 1
