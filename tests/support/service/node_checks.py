"""What is true of the Node client's conversation with every server."""

from __future__ import annotations

from typing import Any


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
