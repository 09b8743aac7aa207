"""The contract as another language sees it: a Node program that has the .proto file and nothing else."""

from __future__ import annotations

import pytest

from support.faults.fake_faults import answer_to
from support.service.fake_server import FakeServerThread
from support.service.node_checks import check_conversation
from support.service.node_client import install_node_client, missing_programs, run_node_client

pytestmark = [
    pytest.mark.skipif(bool(missing_programs()), reason=f"not installed: {', '.join(missing_programs())}"),
    pytest.mark.timeout(400),
]


@pytest.fixture(scope="module", autouse=True)
def dependencies() -> None:
    install_node_client()


def test_two_turns() -> None:
    with FakeServerThread() as server:
        seen = run_node_client(server.target)
    check_conversation(seen)
    assert [turn["text"] for turn in seen["turns"]] == [
        answer_to("My name is Ada."),
        answer_to("What is my name?"),
    ]
    assert seen["session"]["labels"] == {"client": "node"}
