"""With whom a session shares KV, and what its first turn tells the engine of its history."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pensieve.store.records import PrefixSharing, SessionConfig
from pensieve.v1 import pensieve_pb2 as pb
from support.service.service_rig import Rig, refusal, serving, spec, user

NONE = pb.SessionConfig(prefix_sharing=pb.PREFIX_SHARING_NONE)


async def scope(rig: Rig, name: str) -> str:
    await rig.run(name, "hi")
    return rig.link.generations[-1].scope


async def create_of(rig: Rig, tenant: str) -> str:
    answer = await rig.api.CreateSession(pb.CreateSessionRequest(), metadata=(("tenant", tenant),))
    name = str(answer.session.name)
    request = pb.RunTurnRequest(session=name, turn=spec("hi"))
    await rig.api.RunTurn(request, metadata=(("tenant", tenant),))
    return rig.link.generations[-1].scope


@pytest.mark.fault(57)
async def test_sessions_of_a_tenant_have_one_scope_and_no_other_tenant_has_it() -> None:
    async with serving() as rig:
        ours = {await scope(rig, await rig.create()) for _ in range(3)}
        assert len(ours) == 1 and "" not in ours
        theirs = await create_of(rig, "other")
        assert theirs and theirs not in ours
        assert await create_of(rig, ""), "a tenant without a name shares with itself, and only with itself"


async def test_a_session_can_opt_out_and_in_again() -> None:
    async with serving() as rig:
        name = await rig.create(config=NONE)
        assert (await rig.session(name)).config.prefix_sharing == pb.PREFIX_SHARING_NONE
        assert await scope(rig, name) == ""
        for given, expected in (
            (pb.PREFIX_SHARING_TENANT, "tenants/acme"),
            (pb.PREFIX_SHARING_NONE, ""),
            (pb.PREFIX_SHARING_UNSPECIFIED, "tenants/acme"),
        ):
            change = pb.Session(config=pb.SessionConfig(prefix_sharing=given))
            request = pb.UpdateSessionRequest(name=name, session=change)
            request.update_mask.paths.append("config.prefix_sharing")
            await rig.api.UpdateSession(request)
            assert await scope(rig, name) == expected


async def test_an_update_of_something_else_leaves_the_choice_alone() -> None:
    async with serving() as rig:
        name = await rig.create(config=NONE)
        change = pb.Session(config=pb.SessionConfig(system_prompt="Be brief."))
        await rig.api.UpdateSession(pb.UpdateSessionRequest(name=name, session=change))
        assert await scope(rig, name) == ""
        fork = (await rig.api.ForkSession(pb.ForkSessionRequest(name=name))).session
        assert await scope(rig, fork.name) == "", "a fork has the configuration of its source"
        change = pb.Session(config=pb.SessionConfig(prefix_sharing=pb.PREFIX_SHARING_TENANT))
        await rig.api.UpdateSession(pb.UpdateSessionRequest(name=name, session=change))
        assert await scope(rig, name) == "tenants/acme", "without a mask what is set is changed"


async def test_a_server_that_shares_nothing() -> None:
    for shares, said in ((True, "prefix_sharing=on"), (False, "prefix_sharing=off")):
        async with serving(prefix_sharing=shares) as rig:
            assert bool(await scope(rig, await rig.create())) is shares
            assert said in (await rig.api.GetServerInfo(pb.GetServerInfoRequest())).features


async def test_an_unknown_choice_is_refused() -> None:
    async with serving() as rig:
        config = pb.SessionConfig(prefix_sharing=7)  # type: ignore[arg-type]
        error = await refusal(rig.api.CreateSession(pb.CreateSessionRequest(config=config)))
        assert error.reason == "FIELD_INVALID" and "config.prefix_sharing" in error.message


def test_a_configuration_without_the_choice_is_stored_as_before() -> None:
    before: dict[str, Any] = {"model": "m", "ttl_s": 3.0}
    config = msgspec.convert(before, SessionConfig)
    assert config.prefix_sharing is PrefixSharing.TENANT
    assert msgspec.to_builtins(config) == before
    opted_out = msgspec.structs.replace(config, prefix_sharing=PrefixSharing.NONE)
    assert msgspec.to_builtins(opted_out) == before | {"prefix_sharing": 2}


async def new_tokens(rig: Rig, name: str, turn: pb.TurnSpec | str = "hi") -> tuple[int, int]:
    """How many tokens of the next turn's context are told to be new, and how many there are."""
    await rig.run(name, turn)
    generation = rig.link.generations[-1]
    return generation.num_new, len(generation.tokens)


async def test_at_a_first_turn_all_is_new_and_later_only_the_input() -> None:
    said = [user("hello"), pb.InputItem(role=pb.ROLE_ASSISTANT, text="the fox")]
    async with serving() as rig:
        for name in (await rig.create("Be brief."), await rig.create("Be brief.", initial_items=said)):
            new, context = await new_tokens(rig, name)
            assert new == context > 0
            new, context = await new_tokens(rig, name)
            assert 0 < new < context


async def test_a_turn_that_left_no_trace_was_not_the_first() -> None:
    async with serving(answer=None) as rig:
        name = await rig.create("Be brief.")
        turn = spec("hi")
        call = rig.call(name, turn)
        generation = await rig.link.next_generation()
        generation.admit()
        await rig.cancel(name, turn.request_id, keep=pb.CancelTurnRequest.KEEP_NOTHING)
        await refusal(call)
        rig.link.answer = lambda _: [1, 2]
        new, context = await new_tokens(rig, name)
        assert new == context


@pytest.mark.parametrize("change", ["fork", "rewind", "prompt", "edit"])
async def test_what_the_model_has_once_answered_to_is_history(change: str) -> None:
    async with serving() as rig:
        name = await rig.create("Be brief.")
        await rig.run(name, "one")
        turn = spec("hi")
        if change == "fork":
            name = (await rig.api.ForkSession(pb.ForkSessionRequest(name=name))).session.name
        elif change == "rewind":
            await rig.api.RewindSession(pb.RewindSessionRequest(name=name, item=1))
        elif change == "prompt":
            session = pb.Session(config=pb.SessionConfig(system_prompt="Be verbose."))
            await rig.api.UpdateSession(pb.UpdateSessionRequest(name=name, session=session))
        else:
            turn = spec("hi", replace_after_item=1)
        new, context = await new_tokens(rig, name, turn)
        assert 0 < new < context


async def test_what_the_recorder_counts_is_the_turns_input() -> None:
    """The length of a turn, not what had to be computed of it: a trace is a load, for any cache."""
    ends = []
    async with serving() as rig:
        rig.conversations.turns._on_turn_end = ends.append
        name = await rig.create("Be brief.")
        await rig.run(name, "hi")
        count = await rig.api.CountTokens(pb.CountTokensRequest(input=[user("hi")]))
        generation = rig.link.generations[-1]
        assert generation.num_new == ends[0].context_tokens > ends[0].new_tokens
        assert ends[0].new_tokens == count.input_tokens
