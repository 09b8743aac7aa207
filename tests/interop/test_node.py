"""The contract as another language sees it: a Node program that has the .proto file and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from support.fake_faults import answer_to
from support.fake_server import FakeServerThread
from support.node_client import install_node_client, missing_programs, run_node_client

pytestmark = [
    pytest.mark.skipif(bool(missing_programs()), reason=f"not installed: {', '.join(missing_programs())}"),
    pytest.mark.timeout(400),
]


@pytest.fixture(scope="module", autouse=True)
def dependencies() -> None:
    install_node_client()


def check_conversation(seen: dict[str, Any]) -> None:
    """True of every server, whatever its model says."""
    assert [turn["events"][0] for turn in seen["turns"]] == ["accepted"] * 2
    for turn in seen["turns"]:
        assert set(turn["events"][1:-1]) <= {"delta", "progress"}
        assert turn["events"][-1] == "completed"
        done = turn["completed"]
        assert (done["request_id"], done["state"]) == (turn["request_id"], "STATE_COMMITTED")
        assert done["output"]["text"] == turn["text"]
        assert done["usage"]["output_tokens"] == len(turn["token_ids"])
        used = done["usage"]
        parts = ("gpu_cached_tokens", "swapped_in_tokens", "recomputed_tokens", "new_tokens")
        assert used["context_tokens"] == sum(used[part] for part in parts)
    roles = [item["role"] for item in seen["items"]]
    assert roles == ["ROLE_SYSTEM", *["ROLE_USER", "ROLE_ASSISTANT"] * 2]
    assert [item["item"] for item in seen["items"]] == [1, 2, 3, 4, 5]
    assert [item["text"] for item in seen["items"] if item["role"] == "ROLE_ASSISTANT"] == [
        turn["text"] for turn in seen["turns"]
    ]
    assert all(item["tokens"]["ids"] for item in seen["items"])
    assert seen["revision"] == seen["turns"][1]["completed"]["revision"] == seen["session"]["revision"] + 2
    assert seen["missing"] == {"code": "NOT_FOUND", "has_details": True}


def test_two_turns() -> None:
    with FakeServerThread() as server:
        seen = run_node_client(server.target)
    check_conversation(seen)
    assert [turn["text"] for turn in seen["turns"]] == [
        answer_to("My name is Ada."),
        answer_to("What is my name?"),
    ]
    assert seen["session"]["labels"] == {"client": "node"}
