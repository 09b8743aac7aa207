"""A session belongs to a model, a tokenizer and a template: nothing else ever continues it unnoticed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pensieve.client import AsyncClient
from pensieve.errors import FailedPrecondition
from pensieve.server.history.binding import ServedModel
from pensieve.store import HistoryStore, Key, open_store
from pensieve.store.memory_store import MemoryStore
from pensieve.store.records import SessionConfig
from pensieve.tokenizer import ChatTokenizer
from pensieve.v1 import pensieve_pb2 as pb
from support.service.service_rig import ANSWER, Rig, refusal, serving, spec, tokenizer, user
from support.store.redis_server import redis_server
from support.tokenizers_ import CHATML, byte_level, write_folder

MISMATCH = ("FAILED_PRECONDITION", "MODEL_MISMATCH")


@pytest.fixture
def permuted(tmp_path: Path) -> ChatTokenizer:
    """The same pieces under other ids: every history reads as something else."""
    described = json.loads(byte_level())
    vocabulary = described["model"]["vocab"]
    added = {token["id"] for token in described["added_tokens"]}
    names = [name for name, number in vocabulary.items() if number not in added]
    numbers = [vocabulary[name] for name in names]
    vocabulary.update(zip(names, [*numbers[1:], numbers[0]], strict=True))
    path = write_folder(tmp_path / "permuted", json.dumps(described), CHATML, bos=None, eos="<|im_end|>")
    return ChatTokenizer.from_folder(path)


@pytest.fixture
def retemplated(tmp_path: Path) -> ChatTokenizer:
    other = CHATML.replace("assistant\\n", "assistant:\\n").replace("'\n'", "'\n\n'")
    path = write_folder(tmp_path / "template", byte_level(), other, bos=None, eos="<|im_end|>")
    return ChatTokenizer.from_folder(path)


async def rebind(rig: Rig, name: str) -> pb.Session:
    request = pb.UpdateSessionRequest(name=name, session=pb.Session(), rebind=True)
    return (await rig.api.UpdateSession(request)).session


def key(name: str) -> Key:
    return Key("acme", name.removeprefix("sessions/"))


async def ids(rig: Rig, name: str) -> list[int]:
    return [token for item in await rig.items(name, tokens=True) for token in item.tokens.ids]


async def refused(rig: Rig, name: str, differs: str) -> None:
    """Everything that would feed the engine is refused; everything that reads works."""
    before = len(rig.link.generations)
    error = await refusal(rig.call(name, spec("and now?")))
    assert (error.code, error.reason) == MISMATCH
    assert error.metadata["differs"] == differs
    assert error.metadata["session_model"] != error.metadata["serving_model"]
    warm = rig.api.WarmSession(pb.WarmSessionRequest(session=name))
    count = rig.api.CountTokens(pb.CountTokensRequest(session=name, input=[user("and now?")]))
    for call in (warm, count):
        assert (await refusal(call)).reason == "MODEL_MISMATCH"
    assert len(rig.link.generations) == before and not rig.link.warmed
    session = await rig.session(name)
    assert session.revision == 2 and not session.HasField("active_turn")
    assert [item.text for item in await rig.items(name)] == ["Be brief.", "hi", ANSWER]


@pytest.mark.fault(54)
async def test_another_tokenizer_never_reads_the_ids_of_the_first(permuted: ChatTokenizer) -> None:
    store, first = MemoryStore(), spec("hi")
    async with serving(store=store) as rig:
        name = await rig.create("Be brief.")
        await rig.run(name, first)
        old = await ids(rig, name)
    async with serving(store=store, speaks=permuted) as rig:
        await refused(rig, name, "tokenizer")
        replay = await rig.stream(name, first)
        assert replay.accepted.replayed and replay.text == replay.completed.output.text == ANSWER
        changed = pb.Session(config=pb.SessionConfig(system_prompt="Be long."))
        request = pb.UpdateSessionRequest(name=name, session=changed)
        assert (await refusal(rig.api.UpdateSession(request))).reason == "MODEL_MISMATCH"
        moved = await rebind(rig, name)
        assert moved.revision == 3
        new = await ids(rig, name)
        assert len(new) == len(old) and new != old
        assert [item.text for item in await rig.items(name)] == ["Be brief.", "hi", ANSWER]
        assert permuted.decode(new) == tokenizer().decode(old)
        assert (await rig.run(name, "and now?")).revision == 4
        assert rig.link.generations[-1].tokens[: len(new)] == new
        assert rig.link.generations[-1].num_new < len(new), "the model has answered in it before"
    async with serving(store=store) as rig:  # a replica that still runs the old one
        assert (await refusal(rig.call(name, spec("and then?")))).reason == "MODEL_MISMATCH"


@pytest.mark.fault(54)
async def test_another_template_and_other_weights_only_rebind(retemplated: ChatTokenizer) -> None:
    store = MemoryStore()
    async with serving(store=store, model_sha256="aa" * 32) as rig:
        name = await rig.create("Be brief.")
        await rig.run(name, "hi")
        old = await ids(rig, name)
    async with serving(store=store, model_sha256="bb" * 32, speaks=retemplated) as rig:
        await refused(rig, name, "model,template")
        labels = pb.UpdateSessionRequest(name=name, session=pb.Session(labels={"a": "b"}))
        assert (await rig.api.UpdateSession(labels)).session.revision == 3, "what feeds no model can change"
        await rebind(rig, name)
        assert await ids(rig, name) == old
        assert (await rig.run(name, "and now?")).revision == 5


@pytest.mark.fault(54)
async def test_a_session_with_token_ids_of_its_client_cannot_be_moved(permuted: ChatTokenizer) -> None:
    store = MemoryStore()
    async with serving(store=store) as rig:
        name = await rig.create()
        verbatim = pb.InputItem(role=pb.ROLE_USER, tokens=pb.TokenIds(ids=[40, 41]))
        await rig.run(name, pb.TurnSpec(request_id=spec().request_id, input=[verbatim]))
    async with serving(store=store, speaks=permuted) as rig:
        request = pb.UpdateSessionRequest(name=name, session=pb.Session(), rebind=True)
        error = await refusal(rig.api.UpdateSession(request))
        assert (error.code, error.reason) == MISMATCH and error.metadata["item"] == "1"
        assert "import" in error.message and (await rig.session(name)).revision == 2


@pytest.mark.fault(54)
async def test_the_sdk_says_what_is_wrong_and_moves_the_session(permuted: ChatTokenizer) -> None:
    store = MemoryStore()
    async with serving(store=store) as rig, AsyncClient(rig.target) as client:
        session = await client.create_session(session_id="moving")
        await session.send("hi")
    moved = serving(store=store, speaks=permuted, model_sha256="ab" * 32)
    async with moved as rig, AsyncClient(rig.target) as client:
        assert (await client.server_info()).model_sha256 == "ab" * 32
        session = client.session("moving")
        with pytest.raises(FailedPrecondition) as caught:
            await session.send("and now?")
        assert caught.value.reason == "MODEL_MISMATCH" and "rebind" in caught.value.message
        assert (await session.rebind()).revision == 3
        assert (await session.send("and now?")).revision == 4


@pytest.mark.fault(54)
async def test_a_view_that_hides_old_turns_survives_the_move(permuted: ChatTokenizer) -> None:
    store = MemoryStore()
    config = pb.SessionConfig(system_prompt="Be brief.", overflow_policy=pb.OVERFLOW_POLICY_DROP_OLDEST_TURNS)
    async with serving(store=store, context_limit=120) as rig:
        name = await rig.create(config=config)
        for number in range(6):
            await rig.run(name, f"question {number}")
        shown = (await rig.session(name)).context_tokens
        assert shown < len(await ids(rig, name)), "some are hidden"
    async with serving(store=store, context_limit=120, speaks=permuted) as rig:
        assert (await rebind(rig, name)).context_tokens == shown


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis)])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[HistoryStore]:
    """Each kind: what a turn says of its session's configuration must be kept by all."""
    with contextlib.ExitStack() as stack:
        url = f"sqlite:///{tmp_path / 'history.sqlite3'}" if request.param == "sqlite" else "memory:"
        if request.param == "redis":
            url = stack.enter_context(redis_server()).url
        opened = open_store(url)
        await opened.open()
        yield opened
        await opened.close()


@pytest.mark.fault(54)
async def test_an_old_session_is_bound_by_its_next_turn(
    store: HistoryStore, permuted: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ServedModel, "bound", lambda _, config: config)  # as before
        async with serving(store=store) as rig:
            name = await rig.create()
            await rig.run(name, "hi")
            assert (await store.load(key(name))).config.binding is None
    async with serving(store=store) as rig:
        await rig.run(name, "and now?")
        bound = (await store.load(key(name))).config.binding
        assert bound is not None and bound.tokenizer == tokenizer().sha256
        records = await store.read(key(name))
        assert records[-1].record.config == SessionConfig(binding=bound)
        await rig.run(name, "and then?")
        assert (await store.read(key(name)))[-1].record.config is None, "said once"
    async with serving(store=store, speaks=permuted) as rig:
        assert (await refusal(rig.call(name, spec("x")))).reason == "MODEL_MISMATCH"


@pytest.mark.fault(54)
async def test_ids_beyond_the_vocabulary_never_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session of the time before it was bound, under a model with fewer tokens."""
    store = MemoryStore()
    monkeypatch.setattr(ServedModel, "bound", lambda _, config: config)
    async with serving(store=store) as rig:
        name = await rig.create()
        await rig.run(name, "hi")
        largest = max(await ids(rig, name))
    async with serving(store=store, vocab_size=largest) as rig:
        error = await refusal(rig.call(name, spec("x")))
        assert (error.code, error.reason) == MISMATCH and error.metadata["differs"] == "vocabulary"
        assert (await refusal(rig.api.WarmSession(pb.WarmSessionRequest(session=name)))).reason == MISMATCH[1]
        assert not rig.link.generations and not rig.link.warmed
    async with serving(store=store, vocab_size=largest + 1) as rig:
        await rig.run(name, "x")


@pytest.mark.fault(54)
async def test_a_fork_belongs_to_what_its_source_does(permuted: ChatTokenizer) -> None:
    store = MemoryStore()
    async with serving(store=store) as rig:
        name = await rig.create("Be brief.")
        await rig.run(name, "hi")
    async with serving(store=store, speaks=permuted) as rig:
        fork = (await rig.api.ForkSession(pb.ForkSessionRequest(name=name))).session.name
        assert (await refusal(rig.call(fork, spec("x")))).reason == "MODEL_MISMATCH"
        await rebind(rig, fork)
        assert (await rig.run(fork, "x")).revision == 3
        await refused(rig, name, "tokenizer")
