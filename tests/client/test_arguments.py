"""What callers write: options that ``help`` shows, names that are nearly right, words, ids of their own."""

from __future__ import annotations

import copy
import inspect
import json
import operator
import pickle
import pydoc
import subprocess
import sys
import uuid
from typing import Any

import pytest

import pensieve.client as sdk
from pensieve import core
from pensieve.client import FinishReason, Phase, Role, decode
from pensieve.client import _requests as requests
from pensieve.client import arguments as names
from pensieve.client import arguments as signatures
from pensieve.client._flows import SessionCore, create_session
from pensieve.client._transport import ClientSettings
from pensieve.client._view import StreamView
from pensieve.client.arguments import CHANGE_KEYS, SAMPLING_KEYS, TURN_KEYS, request_id
from pensieve.errors import InvalidArgument
from pensieve.v1 import pensieve_pb2 as pb
from support.faults.fake_faults import answer_to
from support.service.both_clients import connected
from support.service.fake_conversations import FakeConversations

TABLES = [
    (sdk.SamplingOptions, SAMPLING_KEYS),
    (sdk.TurnOptions, TURN_KEYS),
    (sdk.SessionChanges, CHANGE_KEYS),
]
TAKERS = [
    *((kind, name, TURN_KEYS) for kind in (sdk.Session, sdk.AsyncSession) for name in ("send", "stream")),
    *((kind, name, TURN_KEYS) for kind in (sdk.Session, sdk.AsyncSession) for name in ("edit", "regenerate")),
    *((kind, "update", CHANGE_KEYS) for kind in (sdk.Session, sdk.AsyncSession)),
    *((kind, "create_session", SAMPLING_KEYS) for kind in (sdk.Client, sdk.AsyncClient)),
]


# -- options


@pytest.mark.parametrize(("table", "keys"), TABLES, ids=lambda one: getattr(one, "__name__", ""))
def test_every_option_has_a_meaning(table: type, keys: frozenset[str]) -> None:
    texts = signatures.option_texts(table)
    assert texts.keys() == keys
    assert [name for name, text in texts.items() if not (text.kind and text.meaning.endswith("."))] == []
    shown = pydoc.render_doc(table, renderer=pydoc.plaintext)
    assert all(f"{name}: {text.kind}" in shown for name, text in texts.items())


@pytest.mark.parametrize(("kind", "name", "keys"), TAKERS, ids=lambda one: getattr(one, "__name__", ""))
def test_help_shows_every_option(kind: type, name: str, keys: frozenset[str]) -> None:
    method = getattr(kind, name)
    parameters = inspect.signature(method).parameters
    assert keys <= parameters.keys()
    assert not any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    shown = pydoc.render_doc(method, renderer=pydoc.plaintext)
    for option in keys:
        assert (
            f"\n      {option}: " in shown
            or option in inspect.getfullargspec(inspect.unwrap(method)).kwonlyargs
        )
    if "timeout" in keys:
        assert "Seconds for the whole turn" in shown and "max_output_tokens: int = ..." in shown


def test_a_program_without_its_sources_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: object) -> str:
        raise OSError("could not get source code")

    signatures._tables.cache_clear()
    monkeypatch.setattr(inspect, "getsource", gone)
    try:
        assert signatures.option_texts(sdk.TurnOptions).keys() == TURN_KEYS
    finally:
        signatures._tables.cache_clear()


def test_the_front_page() -> None:
    code = "import pydoc, pensieve; print(pydoc.render_doc(pensieve, renderer=pydoc.plaintext))"
    shown = subprocess.check_output([sys.executable, "-P", "-c", code], text=True)
    front = shown.partition("PACKAGE CONTENTS")[0]
    for word in (
        "Client(",
        "create_session",
        "session.stream",
        "AsyncClient",
        "help(Session.send)",
        "pensieve serve",
    ):
        assert word in front, word
    assert "class Client(" in shown and "class AsyncClient(" in shown


# -- the table of sampling parameters


def test_every_sampling_parameter_has_its_row_and_its_values() -> None:
    contract = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert contract == core.SAMPLING.keys() == set(core.SamplingDefaults.__struct_fields__)
    resolved = set(core.Sampling.__struct_fields__) - {"grammar", "top_logprobs"}
    assert resolved == contract - {"candidate_choice"}
    assert core.SamplingDefaults() == core.SamplingDefaults(
        **dict.fromkeys(contract - {"stop", "stop_token_ids", "logit_bias"})
    )


def test_a_row_says_what_its_values_are() -> None:
    neutral = core.Sampling()
    for name, row in core.SAMPLING.items():
        assert (row.low is None) == (row.high is None), name
        if row.low is not None and (value := getattr(neutral, name)) is not None:
            assert type(value) is row.kind and row.low <= value <= row.high, name
        assert not set(row.aliases) & TURN_KEYS and (row.http in ("", name) or row.http in row.aliases), name
    numbers = {name for name, row in core.SAMPLING.items() if row.kind in (int, float)}
    assert [name for name in numbers if core.SAMPLING[name].low is None] == ["seed"]


# -- names


def test_near_names_lead_to_options() -> None:
    assert set(names.SIMILAR_NAMES.values()) <= TURN_KEYS
    assert not (names.SIMILAR_NAMES.keys() | names.NAME_ADVICE.keys()) & TURN_KEYS
    assert not names.SIMILAR_NAMES.keys() & names.NAME_ADVICE.keys()


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("max_tokens", "here it is 'max_output_tokens'"),
        ("n", "here it is 'candidates'"),
        ("stop_sequences", "here it is 'stop'"),
        ("history", "create_session(initial_items="),
        ("temprature", "did you mean 'temperature'?"),
        ("zzz", "known: allowed_calls, annotations, "),
    ],
)
def test_wrong_names_are_told_the_right_ones(
    client: Any, fake: FakeConversations, wrong: str, right: str
) -> None:
    chat = client.session("s-1")
    for call in (chat.send, chat.stream, chat.regenerate):
        with pytest.raises(TypeError) as caught:
            call(**{wrong: 1})
        assert right in str(caught.value)
    with pytest.raises(TypeError, match="here it is 'max_output_tokens'"):
        client.create_session(max_tokens=1)
    with pytest.raises(TypeError, match="did you mean 'labels'"):
        chat.update(label={})
    assert "StreamTurn" not in fake.calls and "CreateSession" not in fake.calls


# -- words


@pytest.mark.parametrize(
    ("kind", "numbers", "contract"),
    [
        (FinishReason, core.FinishReason, pb.FinishReason),
        (Role, core.Role, pb.Role),
        (Phase, core.Phase, pb.TurnProgress.Phase),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_words_are_those_of_the_contract(kind: Any, numbers: Any, contract: Any) -> None:
    said = {name.removeprefix("FINISH_REASON_").removeprefix("ROLE_").removeprefix("PHASE_"): number
            for name, number in contract.items() if number}  # fmt: skip
    assert {one.name: one.number for one in kind} == said == {one.name: one.value for one in numbers}
    for one in kind:
        assert one == one.number and numbers(one.number) == one == str(one) == f"{one}" == one.name.lower()
        assert one != 99 and one != "else" and not operator.ne(one, one.number)
        assert kind(one.number) is kind(one.name) is kind(str(one)) is one
        assert int(one) == one.number and one in {str(one)} and json.loads(json.dumps(one)) == str(one)
        assert pickle.loads(pickle.dumps(one)) is one is copy.deepcopy(one)


def test_a_wrong_word_is_told_the_right_ones(client: Any) -> None:
    with pytest.raises(ValueError, match=r"'canceled' is not one of eos, stop_sequence, .*, cancelled"):
        FinishReason("canceled")
    with pytest.raises(ValueError, match="99 is not one of eos"):
        FinishReason(99)
    chat = client.session("s-1")
    for options, listed in (
        ({"on_disconnect": "stay"}, "'stay' is not one of cancel, finish"),
        ({"candidate_choice": 3}, "3 is not one of first, best_logprob"),
        ({"items": [("king", "x")]}, "'king' is not one of system, user, assistant, tool"),
        ({"items": [(99, "x")]}, "99 is not one of system"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            chat.send(**options)
        assert listed in str(caught.value)
    with pytest.raises(InvalidArgument, match="'drop' is not one of reject, drop_oldest_turns, drop_oldest"):
        client.create_session(overflow="drop")


def test_words_and_numbers_are_taken_as_options(client: Any, fake: FakeConversations) -> None:
    chat = client.create_session(overflow="drop_oldest")
    assert (
        client.create_session(overflow="Drop_Oldest_Turns").info.overflow
        == chat.info.overflow
        == "drop_oldest_turns"
    )
    chat.send(items=[("USER", "a"), (core.Role.TOOL, "b"), (Role.USER, "c")], on_disconnect="FINISH")
    assert [one.role for one in fake.stream_requests[-1].turn.input] == [
        pb.ROLE_USER,
        pb.ROLE_TOOL,
        pb.ROLE_USER,
    ]
    assert [one.role for one in chat.items()] == ["user", "tool", "user", "assistant"]
    assert chat.last_turn.finish_reason == "eos" == FinishReason.EOS == 1


def test_a_turn_that_shall_finish_is_not_discarded() -> None:
    """However the word was written; and what is None was not said."""
    chat = SessionCore(ClientSettings("x"), "sessions/a")
    for given, discarded in (("FINISH", False), ("finish", False), ("Cancel", True), (None, True)):
        options = {"on_disconnect": given, "token_ids": None, "timeout": None}
        machine = chat.turn_machine("x", None, None, options)
        assert StreamView(chat, machine)._discard_on_close is machine.discard_on_close is discarded
        assert machine.next_request().turn.output.token_ids
    assert not chat.attach_machine("x", None, None).discard_on_close


def test_a_number_of_a_newer_server_stays_a_number() -> None:
    assert decode.finish_reason(99) == 99 and type(decode.finish_reason(99)) is int
    assert decode.item(pb.Item(role=9)).role == 9  # type: ignore[arg-type]


# -- ids


def test_names_become_ids() -> None:
    made = request_id("sessions/a", "r-1")
    assert made == "4b04e152-a9bf-5cad-a352-b72d787a8d39", "another id would make the same name another turn"
    assert made == request_id("sessions/a", "r-1") != request_id("sessions/b", "r-1")
    given = uuid.uuid4()
    assert request_id("x", given) == request_id("x", str(given)) == str(given)
    assert request_id("x", str(given).upper()) == str(given).upper()
    assert request_id("x", None) != request_id("x", None)
    assert request_id("x", "ü" * 128)
    for wrong in ("", "x" * 129, "a\nb", "a\0", 7):
        with pytest.raises(
            InvalidArgument, match="request_id: must be a UUID or 1 to 128 printable characters"
        ):
            request_id("x", wrong)  # type: ignore[arg-type]


def test_a_turn_is_found_by_the_name_it_was_given(client: Any, fake: FakeConversations) -> None:
    chat = client.create_session()
    first = chat.send("Hi", request_id="order 66")
    assert chat.send("Hi", request_id="order 66") == first and len(chat.items()) == 2
    assert chat.get_turn("order 66").text == chat.attach("order 66").finish().text == answer_to("Hi")
    assert chat.cancel("order 66").request_id == first.request_id == request_id(chat.name, "order 66")
    assert chat.send("Ho", request_id="order 67").revision == first.revision + 1
    with pytest.raises(InvalidArgument, match="request_id: must be a UUID here"):
        client.find_turn("mark", request_id="order 66")


def test_every_call_takes_names() -> None:
    settings = ClientSettings("x")
    chat = SessionCore(settings, "sessions/a")
    flows = [
        chat.append([("user", "x")], (), None, "n"),
        chat.rewind(1, None, "n"),
        chat.fork(None, None, None, "n", None, None),
        chat.get_turn("n"),
        chat.cancel("n", "partial", None),
        chat.choose("n", 1, None),
    ]
    assert {next(flow).request.request_id for flow in flows} == {request_id("sessions/a", "n")}
    make: dict[str, Any] = {
        "config": pb.SessionConfig(),
        "request_id": "n",
    }
    for session_id, scope in (("a", "sessions/a"), (None, "")):
        step: Any = next(create_session(settings, requests.new_session(session_id=session_id, **make)))
        assert step.request.request_id == request_id(scope, "n")


# -- where to, and as whom


@pytest.mark.parametrize("target", ["http://127.0.0.1:50051", "https://pensieve.example", "grpc://a:1"])
def test_an_address_of_the_web_is_no_target(target: str) -> None:
    with pytest.raises(InvalidArgument, match="HOST:PORT"):
        sdk.Client(target)


def test_a_key_from_a_file_comes_without_its_line_end() -> None:
    assert ("authorization", "Bearer ck_a_b") in ClientSettings("x", api_key="ck_a_b\r\n").metadata("")
    for key in ("ck_a\nb", "ck_\u00e9", "\x00"):
        with pytest.raises(InvalidArgument, match="api_key"):
            sdk.Client("127.0.0.1:1", api_key=key)


@pytest.mark.parametrize(
    "content", [b"hi", ["hi"], [{"role": "user", "content": "hi"}], {"role": "user", "content": "hi"}]
)
def test_what_is_neither_text_nor_token_ids(content: Any) -> None:
    with pytest.raises(TypeError, match="text or token ids"):
        requests.turn_input(content, None, None)
    with pytest.raises(TypeError, match=r"a role and its content|text or token ids"):
        requests.turn_input(None, None, content if isinstance(content, list) else [("user", content)])


def test_half_a_character_is_told_before_any_call(client: Any, fake: FakeConversations) -> None:
    chat = client.create_session()
    for wrong in ({"text": "a\ud800"}, {"items": [sdk.ToolResult("a\udfff")]}):
        with pytest.raises(InvalidArgument, match="lone surrogate at 1"):
            chat.send(**wrong)
    assert fake.calls == ["CreateSession"]


def test_time_without_end(client: Any) -> None:
    assert client.create_session().send("x", timeout=float("inf")).text == answer_to("x")


def test_a_call_without_end() -> None:
    with connected("sync", timeout=float("inf")) as (client, _):
        assert client.create_session().items() == []


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("top_logprobs", -1), ("max_chunk_tokens", "4"), ("max_chunk_delay", float("nan")), ("token_ids", "no"),
        ("expected_revision", -1), ("replace_after_item", 1 << 64), ("priority", "high"), ("max_duration", "3"),
        ("next_turn_in", float("inf")), ("importance", "much"), ("annotations", {"a": 1}), ("mark", "\ud800"),
        ("must_call", True), ("single_call", "yes"), ("strict_calls", "one"), ("allowed_calls", [3]),
        ("schema", {"a": float("nan")}), ("schema", int), ("choice", "yes"), ("choice", [1]), ("regex", 3),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_told_by_its_option(option: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        requests.stream_turn("s", requests.turn_input("Hi", None, None), {option: value})
    assert [field for field, _ in caught.value.violations] == [option]
