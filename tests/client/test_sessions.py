"""What both clients can do with sessions, on a connection that works (and on one whose calls fail)."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from pensieve.client import FinishReason, HintReceipt, Role, TurnState
from pensieve.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    RevisionMismatch,
    Unavailable,
)
from pensieve.v1 import pensieve_pb2 as pb
from support.faults.fake_faults import answer_to
from support.service.fake_conversations import FakeConversations

ID = "0d1c1e5a-7b1f-4f6e-9a55-2f1d3c6b7a80"


def test_a_conversation(client: Any) -> None:
    chat = client.create_session(system_prompt="Be brief.", session_id="ada-1", temperature=0.0)
    assert (chat.name, chat.id, chat.revision) == ("sessions/ada-1", "ada-1", 1)
    pieces = list(chat.stream("Hi"))
    assert "".join(piece.text for piece in pieces) == answer_to("Hi")
    assert "".join(chr(one) for piece in pieces for one in piece.token_ids) == answer_to("Hi")
    assert [piece.token_offset for piece in pieces] == list(range(0, len(answer_to("Hi")), 3))
    turn = chat.send("Again")
    assert turn.text == answer_to("Again")
    assert (turn.state, turn.finish_reason, turn.seed) == (TurnState.COMMITTED, FinishReason.EOS, 7)
    assert (turn.base_revision, turn.revision, chat.revision) == (2, 3, 3)
    assert turn.usage.reconciles
    assert turn.usage.output_tokens == len(turn.text)
    assert [one.role for one in turn.items] == [Role.USER, Role.ASSISTANT]
    assert [one.item for one in chat.items()] == [1, 2, 3, 4, 5]
    assert chat.last_turn == turn
    assert chat.get_turn(turn.request_id) == turn


def test_token_level_input(client: Any) -> None:
    chat = client.create_session()
    assert chat.send(tokens=[72, 105]).text == answer_to("Hi")
    chat.send(items=[("tool", "42"), (Role.USER, [72, 105])])
    items = chat.items(include_tokens=True)
    assert [one.role for one in items][2:] == [Role.TOOL, Role.USER, Role.ASSISTANT]
    assert items[0].token_ids == (72, 105)
    assert chat.items(after_item=4)[0].item == 5
    with pytest.raises(InvalidArgument):
        chat.send("both", tokens=[1])


def test_import_of_a_transcript(client: Any) -> None:
    source = client.create_session(initial_items=[("system", "s"), ("user", "u"), ("assistant", "a")])
    copy = client.create_session(initial_items=source.items(include_tokens=True))
    assert [one.text for one in copy.items()] == ["s", "u", "a"]


def test_regenerate_replaces_the_last_answer(client: Any, fake: FakeConversations) -> None:
    chat = client.create_session(system_prompt="s")
    chat.send("one")
    chat.send("two")
    chat.regenerate(seed=3)
    spec = fake.stream_requests[-1].turn
    assert (spec.replace_after_item, len(spec.input), spec.expected_revision) == (4, 0, 3)
    assert spec.sampling.seed == 3
    assert [one.text for one in chat.items()] == ["s", "one", answer_to("one"), "two", answer_to("two")]
    assert client.session(chat.id).last_user_item() == 4
    chat.rewind(to_item=3)
    chat.regenerate()
    assert [one.text for one in chat.items()] == ["s", "one", answer_to("one")]


def test_regenerate_needs_a_user_item(client: Any) -> None:
    with pytest.raises(NotFound) as caught:
        client.create_session(system_prompt="s").regenerate()
    assert caught.value.reason == "ITEM_NOT_FOUND"


def test_edit(client: Any) -> None:
    chat = client.create_session(system_prompt="s")
    chat.send("one")
    chat.send("two")
    turn = chat.edit(2, "three")
    assert turn.text == answer_to("three")
    assert [one.text for one in chat.items()] == ["s", "three", answer_to("three")]


def test_fork_and_rewind(client: Any) -> None:
    chat = client.create_session()
    chat.send("one")
    chat.send("two")
    branch = chat.fork(2, session_id="branch")
    assert (branch.name, branch.info.forked_from) == ("sessions/branch", chat.name)
    assert len(branch.items()) == 2
    assert len(chat.fork().items()) == 4
    assert [chat.fork(ttl=ttl).info.ttl_s for ttl in (None, 60, 0)] == [0, 60, 0]
    with pytest.raises(InvalidArgument, match="ttl"):
        chat.fork(ttl="soon")
    assert chat.rewind(to_item=2).revision == chat.revision == 4
    assert [one.item for one in chat.items()] == [1, 2]


def test_update_changes_only_what_is_given(client: Any) -> None:
    chat = client.create_session(system_prompt="old", labels={"a": "1"}, ttl=60)
    info = chat.update(ttl=1.5, labels={"b": "2"})
    assert (info.ttl_s, info.labels, info.system_prompt) == (1.5, {"b": "2"}, "old")
    info = chat.update(system_prompt="new", overflow="drop_oldest_turns", default_sampling={"top_k": 0})
    assert (info.system_prompt, info.overflow) == ("new", "drop_oldest_turns")
    assert info.default_sampling == {"top_k": 0}
    assert chat.refresh().revision == chat.revision == 3
    with pytest.raises(TypeError, match="unknown option 'tll'"):
        chat.update(tll=1)


def test_paging(client: Any, fake: FakeConversations) -> None:
    fake.page_size = 2
    chats = [client.create_session(labels={"kind": str(i % 2)}) for i in range(5)]
    chats[0].send("one")
    chats[0].send("two")
    assert len(chats[0].items()) == 4
    assert [one.name for one in client.sessions()] == [one.name for one in chats]
    assert len(client.sessions(limit=3)) == 3
    assert len(client.sessions(labels={"kind": "1"})) == 2


def test_delete(client: Any, fake: FakeConversations) -> None:
    chat = client.create_session()
    chat.delete()
    with pytest.raises(NotFound) as caught:
        chat.send("hi")
    assert caught.value.reason == "SESSION_NOT_FOUND"
    with pytest.raises(NotFound):
        chat.delete()
    chat.delete(allow_missing=True)


@pytest.mark.parametrize("unused_only", [False, True])
def test_a_delete_whose_answer_was_lost(client: Any, fake: FakeConversations, unused_only: bool) -> None:
    chat = client.create_session()
    fake.unary_script.append(grpc.StatusCode.UNAVAILABLE)
    chat.delete(unused_only=unused_only)
    assert fake.calls.count("DeleteSession") == 2


def test_server_info_and_count_tokens(client: Any) -> None:
    info = client.server_info()
    assert (info.version, info.model, info.features) == ("0.1.0", "fake", ("fake",))
    count = client.create_session().count_tokens("abc")
    assert (count.input_tokens, count.context_limit, count.fits) == (3, 4096, True)


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN]
)
def test_unary_calls_survive_a_broken_connection(
    client: Any, fake: FakeConversations, code: grpc.StatusCode
) -> None:
    fake.unary_script.extend([code, code])
    chat = client.create_session()
    assert len(fake.sessions) == 1
    fake.unary_script.extend([code, code])
    assert chat.items() == []


def test_unary_errors_are_raised_as_they_are(client: Any, fake: FakeConversations) -> None:
    client.create_session(session_id="x")
    fake.calls.clear()
    with pytest.raises(AlreadyExists) as caught:
        client.create_session(session_id="x")
    assert caught.value.reason == "SESSION_EXISTS"
    fake.unary_script.extend([Unavailable("x", reason="STORE_UNAVAILABLE")] * 100)
    with pytest.raises(Unavailable) as down:
        client.server_info()
    assert down.value.reason == "STORE_UNAVAILABLE"


def test_expected_revision(client: Any) -> None:
    chat = client.create_session()
    chat.send("one", expected_revision=1)
    with pytest.raises(RevisionMismatch) as caught:
        chat.send("two", expected_revision=1)
    assert caught.value.metadata["current_revision"] == "2"


def test_options_become_fields(client: Any, fake: FakeConversations) -> None:
    client.create_session().send(
        "x",
        request_id=ID,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        min_p=0.1,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        seed=9,
        max_output_tokens=10,
        min_output_tokens=0,
        stop="END",
        stop_token_ids=[1, 2],
        ignore_eos=True,
        logit_bias={5: -1.0},
        top_logprobs=0,
        token_ids=False,
        max_chunk_tokens=8,
        max_chunk_delay=0.25,
        pad_chunks=True,
        max_duration=2,
        priority=1,
        on_disconnect="finish",
    )
    request = fake.stream_requests[-1]
    spec = request.turn
    expected = pb.SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        min_p=0.1,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        seed=9,
        max_output_tokens=10,
        min_output_tokens=0,
        stop=["END"],
        stop_token_ids=[1, 2],
        ignore_eos=True,
        logit_bias={5: -1.0},
    )
    assert spec.sampling == expected
    assert (spec.request_id, spec.priority, spec.max_duration.seconds) == (ID, 1, 2)
    assert not spec.HasField("expected_revision") and not spec.HasField("replace_after_item")
    output = spec.output
    assert output.HasField("top_logprobs") and output.top_logprobs == 0
    assert (output.token_ids, output.max_chunk_tokens, output.pad_chunks) == (False, 8, True)
    assert output.max_chunk_delay.nanos == 250_000_000
    assert request.on_disconnect == pb.DISCONNECT_POLICY_FINISH


def test_unset_options_stay_unset(client: Any, fake: FakeConversations) -> None:
    client.create_session().send("x")
    spec = fake.stream_requests[-1].turn
    assert not spec.sampling.ListFields()
    assert spec.output.token_ids and not spec.output.HasField("top_logprobs")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temprature": 1.0}, TypeError),
        ({"top_k": -1}, InvalidArgument),
        ({"temperature": "hot"}, InvalidArgument),
        ({"on_disconnect": "maybe"}, InvalidArgument),
    ],
)
def test_wrong_options_fail_before_any_call(
    client: Any, fake: FakeConversations, options: dict[str, Any], error: type[Exception]
) -> None:
    chat = client.create_session()
    fake.calls.clear()
    with pytest.raises(error):
        chat.send("x", **options)
    assert fake.calls == []


def test_hints_travel_and_come_back_as_a_receipt(client: Any, fake: FakeConversations) -> None:
    chat = client.create_session()
    turn = chat.send("x", next_turn_in=1.5, importance=2.0)
    hints = fake.stream_requests[-1].turn.hints
    assert (hints.next_turn_in.ToMilliseconds(), hints.importance, hints.session_finished) == (
        1500,
        2.0,
        False,
    )
    assert turn.hints == HintReceipt(next_turn_s=1.5, ignored=("importance",))
    assert chat.get_turn(turn.request_id).hints == turn.hints
    assert chat.send("x", next_turn_in=0).hints == HintReceipt(next_turn_s=0.0)
    last = chat.send("x", session_finished=True)
    assert last.hints == HintReceipt(finished=True)
    assert chat.send("x").hints is None and not fake.stream_requests[-1].turn.HasField("hints")


def test_sharing_of_prefixes(client: Any, fake: FakeConversations) -> None:
    own = client.create_session(share_prefixes=False)
    stored = fake.sessions[own.name].message.config
    assert stored.prefix_sharing == pb.PREFIX_SHARING_NONE and own.info.share_prefixes is False
    assert own.update(share_prefixes=True).share_prefixes is True
    assert stored.prefix_sharing == pb.PREFIX_SHARING_TENANT
    assert own.update(ttl=5.0).share_prefixes is True
    usual = client.create_session()
    unset = fake.sessions[usual.name].message.config.prefix_sharing
    assert unset == pb.PREFIX_SHARING_UNSPECIFIED and usual.info.share_prefixes is True


def test_warm(client: Any, fake: FakeConversations) -> None:
    chat = client.create_session()
    assert (chat.warm().accepted, chat.warm().refused) == (False, "nothing_to_do")
    chat.send("x")
    warming = chat.warm()
    assert warming.accepted and not warming.refused
    assert (warming.residency.host_tokens, warming.residency.as_of_revision) == (3, 2)
    fake.calls.clear()
    fake.unary_script.append(ResourceExhausted("too much", retry_after_s=0.01))
    with pytest.raises(ResourceExhausted):
        chat.warm()
    assert fake.calls == ["WarmSession"], "a wish is not worth a second try"


def test_metadata_carries_the_route(client: Any, fake: FakeConversations) -> None:
    chat = client.create_session()
    chat.send("x")
    assert fake.metadata[-1]["x-session-route"] == chat.name
    assert "authorization" not in fake.metadata[-1]
