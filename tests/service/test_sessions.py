"""Everything about sessions but their turns."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

from google.protobuf.duration_pb2 import Duration

from pensieve.store.memory_store import MemoryStore
from pensieve.v1 import pensieve_pb2 as pb
from support.service.service_rig import ANSWER, Rig, encode, refusal, says, serving, spec, uid, user


async def talk(rig: Rig, turns: int = 2, system: str = "Be brief.") -> str:
    """A session with a system prompt (item 1) and some turns (items 2, 3, …)."""
    name = await rig.create(system)
    for number in range(turns):
        await rig.run(name, f"question {number}")
    return name


async def context(rig: Rig, name: str) -> list[int]:
    return [token for item in await rig.items(name, tokens=True) for token in item.tokens.ids]


async def test_create_is_idempotent_by_request_id() -> None:
    async with serving() as rig:
        request = pb.CreateSessionRequest(request_id=uid(), config=pb.SessionConfig(system_prompt="a"))
        answers = await asyncio.gather(*(rig.api.CreateSession(request) for _ in range(10)))
        assert len({answer.session.name for answer in answers}) == 1
        assert answers[0].session.revision == 1
        request.config.system_prompt = "b"
        assert (await refusal(rig.api.CreateSession(request))).reason == "REQUEST_ID_REUSED"


async def test_create_with_an_own_id() -> None:
    async with serving() as rig:
        assert await rig.create(session_id="my-chat") == "sessions/my-chat"
        assert await rig.create(session_id="my-chat") == "sessions/my-chat"
        other = pb.CreateSessionRequest(session_id="my-chat", config=pb.SessionConfig(system_prompt="x"))
        error = await refusal(rig.api.CreateSession(other))
        assert (error.code, error.reason) == ("ALREADY_EXISTS", "SESSION_EXISTS")


async def test_import_of_a_transcript() -> None:
    async with serving() as rig:
        said = [user("hello"), pb.InputItem(role=pb.ROLE_ASSISTANT, text="the fox")]
        imported = await rig.create("Be brief.", initial_items=said)
        rig.link.answer = lambda _: [*encode("the fox"), rig_eos()]
        lived = await rig.create("Be brief.")
        await rig.run(lived, "hello")
        whole, ends = await context(rig, imported), await context(rig, lived)
        assert whole[: len(ends)] == ends and whole[len(ends) :] == encode("\n"), (
            "all that the template writes"
        )
        for name in (imported, lived):
            await rig.run(name, "and now?")
        assert rig.link.generations[-2].tokens == rig.link.generations[-1].tokens
        followed = pb.CreateSessionRequest(
            config=pb.SessionConfig(system_prompt="Be brief."), initial_items=said, followed_by=[pb.ROLE_USER]
        )
        name = (await rig.api.CreateSession(followed)).session.name
        assert await context(rig, name) == ends
        assert [item.item for item in await rig.items(name)] == [1, 2, 3]


def rig_eos() -> int:
    from support.service.service_rig import eos

    return eos()


async def test_get_full_shows_residency() -> None:
    async with serving() as rig:
        name = await talk(rig, 1)
        basic = await rig.session(name)
        assert not basic.HasField("residency") and basic.context_limit == 256
        request = pb.GetSessionRequest(name=name, view=pb.SESSION_VIEW_FULL)
        full = (await rig.api.GetSession(request)).session
        cached = full.residency
        assert (cached.gpu_tokens, cached.host_tokens, cached.replica) == (3, 2, "r1")
        assert cached.gpu_tokens + cached.host_tokens + cached.dropped_tokens == full.context_tokens


async def test_listing_in_pages_with_labels() -> None:
    async with serving() as rig:
        names = {await rig.create(labels={"team": "a" if i % 2 else "b"}) for i in range(7)}
        seen: list[str] = []
        token = ""
        while True:
            request = pb.ListSessionsRequest(page_size=2, page_token=token)
            page = await rig.api.ListSessions(request)
            seen += [session.name for session in page.sessions]
            token = page.next_page_token
            if not token:
                break
        assert set(seen) == names and len(seen) == 7
        chosen = await rig.api.ListSessions(pb.ListSessionsRequest(label_selector="team=a"))
        assert len(chosen.sessions) == 3


async def test_pages_of_items_show_one_revision() -> None:
    async with serving() as rig:
        name = await talk(rig, 2)
        first = await rig.api.ListItems(pb.ListItemsRequest(name=name, page_size=2))
        await rig.api.RewindSession(pb.RewindSessionRequest(name=name, item=1))
        request = pb.ListItemsRequest(name=name, page_size=10, page_token=first.next_page_token)
        second = await rig.api.ListItems(request)
        assert first.revision == second.revision == 3
        assert [item.item for item in [*first.items, *second.items]] == [1, 2, 3, 4, 5]
        assert [item.item for item in await rig.items(name)] == [1]
        after = await rig.api.ListItems(pb.ListItemsRequest(name=name, after_item=1))
        assert not after.items


async def update(rig: Rig, name: str, *paths: str, expected: int | None = None, **config: Any) -> pb.Session:
    request = pb.UpdateSessionRequest(name=name, session=pb.Session(config=pb.SessionConfig(**config)))
    request.update_mask.paths.extend(paths)
    if expected is not None:
        request.expected_revision = expected
    return (await rig.api.UpdateSession(request)).session


async def test_update_of_defaults_keeps_the_history() -> None:
    async with serving() as rig:
        name = await talk(rig, 1)
        before = await context(rig, name)
        params = pb.SamplingParams(temperature=0.5)
        session = await update(rig, name, "config.default_sampling", default_sampling=params)
        assert session.revision == 3 and session.config.system_prompt == "Be brief."
        assert await context(rig, name) == before
        await rig.run(name, "x")
        assert rig.link.generations[-1].sampling.temperature == 0.5


async def test_update_of_labels_without_a_mask() -> None:
    async with serving() as rig:
        name = await talk(rig, 0)
        request = pb.UpdateSessionRequest(name=name, session=pb.Session(labels={"a": "b"}))
        session = (await rig.api.UpdateSession(request)).session
        assert dict(session.labels) == {"a": "b"} and session.config.system_prompt == "Be brief."


async def test_update_with_a_stale_revision() -> None:
    async with serving() as rig:
        name = await talk(rig, 1)
        request = pb.UpdateSessionRequest(
            name=name, session=pb.Session(labels={"a": "b"}), expected_revision=1
        )
        error = await refusal(rig.api.UpdateSession(request))
        assert (error.reason, error.metadata["current_revision"]) == ("REVISION_MISMATCH", "2")
        request.expected_revision = 9
        assert (await refusal(rig.api.UpdateSession(request))).reason == "HISTORY_REGRESSED"


async def test_a_new_system_prompt_is_as_if_it_had_been_there() -> None:
    async with serving() as rig:
        for before, after in (("Be brief.", "Be verbose."), ("", "Be verbose."), ("Be brief.", "")):
            changed, fresh = await talk(rig, 2, before), await talk(rig, 2, after)
            session = await update(rig, changed, "config.system_prompt", system_prompt=after)
            assert session.config.system_prompt == after and session.revision == 4
            assert await context(rig, changed) == await context(rig, fresh)
            assert session.context_tokens == len(await context(rig, changed))
            numbers = [item.item for item in await rig.items(changed)]
            assert numbers == sorted(numbers) and numbers[0] > 4  # never reused
            await rig.run(changed, "more")


async def test_fork_copies_and_parts() -> None:
    async with serving() as rig:
        name = await talk(rig, 2)
        request = pb.ForkSessionRequest(name=name, request_id=uid(), item=3)
        forked = (await rig.api.ForkSession(request)).session
        assert (forked.forked_from, forked.forked_from_item, forked.revision) == (name, 3, 1)
        assert await context(rig, forked.name) == (await context(rig, name))[: forked.context_tokens]
        await rig.run(forked.name, "elsewhere")
        assert (await rig.session(name)).revision == 3
        await rig.api.RewindSession(pb.RewindSessionRequest(name=name, item=1))
        assert (await rig.api.ForkSession(request)).session.name == forked.name
        request.item = 1
        assert (await refusal(rig.api.ForkSession(request))).reason == "REQUEST_ID_REUSED"


async def test_fork_of_everything_to_an_own_id() -> None:
    async with serving() as rig:
        name = await talk(rig, 1)
        request = pb.ForkSessionRequest(name=name, session_id="branch-1", expected_revision=1)
        assert (await refusal(rig.api.ForkSession(request))).reason == "REVISION_MISMATCH"
        request.expected_revision = 2
        assert (await rig.api.ForkSession(request)).session.name == "sessions/branch-1"
        assert await context(rig, "sessions/branch-1") == await context(rig, name)


async def test_a_fork_may_have_another_lifetime() -> None:
    async with serving() as rig:
        name = await rig.create(config=pb.SessionConfig(ttl=Duration(seconds=60)))
        inherited = pb.ForkSessionRequest(name=name, request_id=uid())
        shorter = pb.ForkSessionRequest(name=name, request_id=uid(), ttl=Duration(seconds=5))
        lasting = pb.ForkSessionRequest(name=name, request_id=uid(), ttl=Duration())
        for request, seconds in ((inherited, 60), (shorter, 5), (lasting, 0)):
            copy = (await rig.api.ForkSession(request)).session
            assert (copy.revision, copy.config.ttl.seconds) == (1, seconds)
            assert copy.HasField("expire_time") is bool(seconds)
            assert (await rig.api.ForkSession(request)).session.name == copy.name
        shorter.ttl.seconds = 6
        assert (await refusal(rig.api.ForkSession(shorter))).reason == "REQUEST_ID_REUSED"
        shorter.ttl.nanos = -1
        assert (await refusal(rig.api.ForkSession(shorter))).reason == "FIELD_INVALID"


async def test_rewind_is_idempotent_and_keeps_the_prompt() -> None:
    async with serving() as rig:
        name = await talk(rig, 2)
        request = pb.RewindSessionRequest(name=name, request_id=uid(), item=3)
        assert (await rig.api.RewindSession(request)).session.revision == 4
        await rig.run(name, "again")
        assert (await rig.api.RewindSession(request)).session.revision == 5  # no second effect
        assert [item.item for item in await rig.items(name)] == [1, 2, 3, 6, 7]
        missing = pb.RewindSessionRequest(name=name, item=5)
        assert (await refusal(rig.api.RewindSession(missing))).reason == "ITEM_NOT_FOUND"
        await rig.api.RewindSession(pb.RewindSessionRequest(name=name, item=0))
        assert [item.text for item in await rig.items(name)] == ["Be brief."]


async def test_edit_and_regenerate_are_atomic() -> None:
    async with serving() as rig:
        name = await talk(rig, 2)
        old = await rig.items(name)
        rig.link.answer = None
        rig.link.submitted.clear()
        turn = spec(replace_after_item=4)
        call = rig.call(name, turn)
        generation = await rig.link.next_generation()
        generation.admit()
        generation.emit(*encode("half"))
        await rig.cancel(name, turn.request_id, keep=pb.CancelTurnRequest.KEEP_NOTHING)
        assert (await refusal(call)).code == "CANCELLED"
        assert await rig.items(name) == old
        rig.link.answer = lambda _: encode("another answer")
        done = await rig.run(name, spec(replace_after_item=4))
        assert not done.input and done.output.item == 6
        assert [item.item for item in await rig.items(name)] == [1, 2, 3, 4, 6]
        done = await rig.run(name, spec("a better question", replace_after_item=1))
        assert [(item.item, item.text) for item in await rig.items(name)] == [
            (1, "Be brief."),
            (7, "a better question"),
            (8, "another answer"),
        ]
        error = await refusal(rig.call(name, spec("x", replace_after_item=3)))
        assert (error.code, error.reason) == ("NOT_FOUND", "ITEM_NOT_FOUND")


async def test_delete() -> None:
    async with serving() as rig:
        name = await talk(rig, 1)
        stale = pb.DeleteSessionRequest(name=name, expected_revision=1)
        assert (await refusal(rig.api.DeleteSession(stale))).reason == "REVISION_MISMATCH"
        await rig.api.DeleteSession(pb.DeleteSessionRequest(name=name))
        assert (
            await refusal(rig.api.GetSession(pb.GetSessionRequest(name=name)))
        ).reason == "SESSION_DELETED"
        again = pb.DeleteSessionRequest(name=name)
        assert (await refusal(rig.api.DeleteSession(again))).reason == "SESSION_DELETED"
        again.allow_missing = True
        await rig.api.DeleteSession(again)
        missing = pb.DeleteSessionRequest(name="sessions/never-was")
        assert (await refusal(rig.api.DeleteSession(missing))).reason == "SESSION_NOT_FOUND"
        missing.allow_missing = True
        await rig.api.DeleteSession(missing)


async def test_a_deleted_session_may_leave_its_cached_state() -> None:
    async with serving() as rig:
        for subject, kept in (("", True), ("ada", False)):
            name = await rig.create(config=pb.SessionConfig(subject=subject))
            await rig.stream(name, "hi")
            rig.link.evicted.clear()
            await rig.api.DeleteSession(
                pb.DeleteSessionRequest(name=name, keep_cached=True, allow_missing=True)
            )
            assert (rig.link.evicted == []) is kept, "an erasure of the subject would not find it any more"
            gone = await refusal(rig.api.GetSession(pb.GetSessionRequest(name=name)))
            assert gone.reason == "SESSION_DELETED"


def unused(name: str, **fields: Any) -> pb.DeleteSessionRequest:
    return pb.DeleteSessionRequest(name=name, unused_only=True, **fields)


async def test_a_session_that_never_had_a_turn_leaves_its_id_free() -> None:
    async with serving(answer=None) as rig:
        said = [user("hello"), pb.InputItem(role=pb.ROLE_ASSISTANT, text="the fox")]
        name = await rig.create("Be brief.", session_id="mine", initial_items=said)
        await rig.api.AppendItems(pb.AppendItemsRequest(name=name, items=[user("more")]))
        await rig.items(name)  # the history is cached
        stale = unused(name, expected_revision=1)
        assert (await refusal(rig.api.DeleteSession(stale))).reason == "REVISION_MISMATCH"
        discarded = spec("a")
        call = rig.call(name, discarded)
        generation = await rig.link.next_generation()
        generation.admit()
        error = await refusal(rig.api.DeleteSession(unused(name)))
        assert (error.code, error.reason) == ("ABORTED", "TURN_IN_PROGRESS")
        await rig.cancel(name, discarded.request_id, keep=pb.CancelTurnRequest.KEEP_NOTHING)
        assert (await refusal(call)).reason == "TURN_CANCELLED"
        rig.link.evicted.clear()
        await rig.api.DeleteSession(unused(name, expected_revision=2))
        assert len(rig.link.evicted) == 1
        gone = await refusal(rig.api.GetSession(pb.GetSessionRequest(name=name)))
        assert (gone.code, gone.reason) == ("NOT_FOUND", "SESSION_NOT_FOUND")
        assert (await refusal(rig.api.DeleteSession(unused(name)))).reason == "SESSION_NOT_FOUND"
        await rig.api.DeleteSession(unused(name, allow_missing=True))
        # Another session has the id now, and is not taken for one that lost what it had.
        assert await rig.create("Be kind.", session_id="mine") == name
        rig.link.answer = lambda _: says("better")
        turn = await rig.run(name, discarded)
        assert (turn.output.text, turn.base_revision) == ("better", 1)
        assert [item.text for item in await rig.items(name)] == ["Be kind.", "a", "better"]


async def test_another_server_takes_the_next_session_of_an_id_for_what_it_is() -> None:
    ticks = itertools.count(1_700_000_000_000)
    async with (
        serving(store=MemoryStore(clock=lambda: next(ticks))) as rig,
        serving(store=rig.store) as other,
    ):
        name = await rig.create("Be brief.", session_id="mine")
        await rig.api.AppendItems(pb.AppendItemsRequest(name=name, items=[user("more")]))
        assert len(await other.items(name)) == 2  # it knows revision 2
        await rig.api.DeleteSession(unused(name))
        await rig.create("Be kind.", session_id="mine")
        assert (await other.run(name, "a")).base_revision == 1
        assert [item.text for item in await other.items(name)] == ["Be kind.", "a", ANSWER]
        assert (await refusal(rig.api.DeleteSession(unused(name)))).reason == "SESSION_USED"


async def test_a_session_that_has_had_a_turn_is_not_unused() -> None:
    async with serving() as rig:
        name = await talk(rig, 1)
        copy = await rig.api.ForkSession(pb.ForkSessionRequest(name=name, request_id=uid()))
        for change in (
            None,
            pb.RewindSessionRequest(name=name),
            pb.RewindSessionRequest(name=name, erase=True),
        ):
            if change is not None:
                await rig.api.RewindSession(change)
            for request in (unused(name), unused(name, allow_missing=True)):
                error = await refusal(rig.api.DeleteSession(request))
                assert (error.code, error.reason) == ("FAILED_PRECONDITION", "SESSION_USED")
        assert (await rig.session(name)).revision == 4
        # A fork has had no turn of its own.
        await rig.api.DeleteSession(unused(copy.session.name))
        await rig.api.DeleteSession(pb.DeleteSessionRequest(name=name))
        assert (await refusal(rig.api.DeleteSession(unused(name)))).reason == "SESSION_DELETED"
        await rig.api.DeleteSession(unused(name, allow_missing=True))
        assert (
            await refusal(rig.create(session_id=name.removeprefix("sessions/")))
        ).reason == "SESSION_DELETED"


async def test_count_tokens_foretells_the_turn() -> None:
    async with serving() as rig:
        name = await talk(rig, 1)
        count = await rig.api.CountTokens(pb.CountTokensRequest(session=name, input=[user("next")]))
        usage = (await rig.run(name, "next")).usage
        assert (count.input_tokens, count.context_tokens) == (usage.new_tokens, usage.context_tokens)
        alone = await rig.api.CountTokens(pb.CountTokensRequest(input=[user("next")]))
        assert alone.input_tokens == alone.context_tokens > 0


async def test_server_info_and_admin() -> None:
    async with serving() as rig:
        info = await rig.api.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.model, info.replica, info.context_limit) == ("tiny", "r1", 256)
        assert "durability=none" in info.features and info.limits.max_top_logprobs == 20
        assert any(feature.startswith("numerics=") for feature in info.features)
        assert len(info.tokenizer_sha256) == 64
        stats = await rig.admin.GetStats(pb.GetStatsRequest())
        assert (stats.store_state, stats.gpu_tokens_used) == ("serving", 7)
        seen = stats.last_engine_step_time.ToMilliseconds()
        assert abs(seen - time.time() * 1000) < 600_000, "a step was seen just now"
        again = await rig.admin.GetStats(pb.GetStatsRequest())
        assert again.last_engine_step_time == stats.last_engine_step_time, "no step since"
        name = await rig.create()
        assert (await rig.admin.EvictCache(pb.EvictCacheRequest(session=name))).tokens_evicted == 11
        assert rig.link.evicted == ["acme/" + name.removeprefix("sessions/")]


async def test_another_process_sees_what_this_one_wrote() -> None:
    """Two front ends on one store: the history cache of each follows the other's commits."""
    async with serving() as one, serving(store=one.store) as two:
        name = await one.create()
        for rig in (one, two, one, two):
            await rig.run(name, "hello")
        assert [item.item for item in await two.items(name)] == list(range(1, 9))
        assert await context(one, name) == await context(two, name)
        assert (await one.items(name))[-1].text == ANSWER
