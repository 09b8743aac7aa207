"""The whole product as its users have it: ``pensieve serve`` with the demo model, real clients, real processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from urllib.request import urlopen

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from pensieve import AsyncClient, Client, ContextLimitExceeded
from pensieve.client import FinishReason
from pensieve.demo import MODEL_DIR
from pensieve.spawn import ServerProcess
from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc
from support.lengths import LONG
from support.replay.openai_stub import Model
from support.service.node_checks import check_conversation
from support.service.node_client import install_node_client, missing_programs, run_node_client

pytestmark = pytest.mark.timeout(400)
SMALL = ("--device-cache", "512tokens", "--host-cache", "512tokens", "--chunk-tokens", "16", "--threads", "1")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--model", "demo", "--store", "memory:", *SMALL) as process:
        yield process
    assert process.stop() == 0


def test_a_chat_from_python(server: ServerProcess) -> None:
    with Client(server.target) as client:
        chat = client.create_session(system_prompt="Be brief.", labels={"suite": "e2e"})
        pieces = [piece.text for piece in chat.stream("My name is Ada.", max_output_tokens=24)]
        first = chat.last_turn
        assert first is not None
        assert "".join(pieces) == first.text
        second = chat.send("What is my name?", max_output_tokens=24)
        assert second.usage.reconciles
        assert second.usage.context_tokens == (
            first.usage.context_tokens + first.usage.output_tokens + second.usage.new_tokens
        )
        assert second.usage.recomputed_tokens == 0
        branch = chat.fork()
        assert branch.send("What is my name?", max_output_tokens=24).text
        chat.regenerate(max_output_tokens=24)
        chat.rewind(to_item=3)
        assert [item.item for item in chat.items()] == [1, 2, 3]
        tokens = [token for item in chat.items(include_tokens=True) for token in item.token_ids or ()]
        assert len(tokens) == chat.refresh().context_tokens
        chat.delete()
        branch.delete()


def test_greedy_answers_do_not_depend_on_the_cache(server: ServerProcess) -> None:
    """The same conversation, undisturbed, and with everything evicted between its turns."""
    admin = pensieve_pb2_grpc.AdminServiceStub(grpc.insecure_channel(server.admin))
    answers = []
    with Client(server.target) as client:
        for evict in (False, True):
            chat = client.create_session()
            texts = []
            for line in ("My cat is called Mimi.", "I live in Lisbon.", "What is my cat called?"):
                texts.append(chat.send(line, max_output_tokens=24).token_ids)
                if evict:
                    admin.EvictCache(pb.EvictCacheRequest())
            answers.append(texts)
            last = chat.last_turn
            assert last is not None
            assert (last.usage.recomputed_tokens > 0) is evict
    assert answers[0] == answers[1]


def test_answers_are_those_of_transformers(server: ServerProcess) -> None:
    """Greedy answers of forced lengths to the same token ids, turn by turn."""
    generator = np.random.default_rng(5)
    inputs = [[int(token) for token in generator.integers(0, 1536, 40)] for _ in range(4)]
    model, history, expected = Model(MODEL_DIR), list[int](), []
    for ids in inputs:
        expected.append(list(model.answer(history + ids, 12, least=12)))
        history += ids + expected[-1]
    stateless = ("--model", "demo", "--store", "memory:", "--threads", "1", "--stateless")
    for started in (nullcontext(server), *([ServerProcess(*stateless)] if LONG else [])):
        with started as running, Client(running.target) as client:
            chat = client.create_session()
            turns = [
                chat.send(tokens=ids, max_output_tokens=12, min_output_tokens=12, ignore_eos=True)
                for ids in inputs
            ]
            assert [list(turn.token_ids) for turn in turns] == expected
            chat.delete()


def test_many_sessions_on_tiny_tiers(server: ServerProcess) -> None:
    async def talk(client: AsyncClient, number: int) -> None:
        chat = await client.create_session()
        held = 0
        for turn_number in range(4):
            line = f"Message {turn_number} of talk {number}, please answer."
            turn = await chat.send(line, max_output_tokens=20, min_output_tokens=20, ignore_eos=True)
            assert turn.finish_reason is FinishReason.LENGTH
            assert turn.usage.reconciles
            assert turn.usage.context_tokens == held + turn.usage.new_tokens
            held = turn.usage.context_tokens + turn.usage.output_tokens

    async def everyone() -> None:
        async with AsyncClient(server.target) as client:
            await asyncio.gather(*(talk(client, number) for number in range(10)))

    asyncio.run(everyone())
    assert server.metric("pensieve_context_tokens_total", source="host") > 0
    assert server.metric("pensieve_context_tokens_total", source="recomputed") > 0


def test_a_context_that_cannot_fit_is_refused(server: ServerProcess) -> None:
    with Client(server.target) as client:
        chat = client.create_session()
        with pytest.raises(ContextLimitExceeded):
            chat.send(tokens=[5] * 600)
        assert chat.refresh().revision == 1


@pytest.mark.skipif(bool(missing_programs()), reason=f"not installed: {', '.join(missing_programs())}")
def test_a_client_in_another_language(server: ServerProcess) -> None:
    install_node_client()
    check_conversation(run_node_client(server.target))


def test_reflection_serves_the_contract(server: ServerProcess) -> None:
    """A client without the .proto file: everything it needs comes from the server."""
    with grpc.insecure_channel(server.target) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "pensieve.v1.ConversationService" in database.get_services()
        pool = descriptor_pool.DescriptorPool(database)
        method = pool.FindServiceByName("pensieve.v1.ConversationService").FindMethodByName("GetServerInfo")
        request = message_factory.GetMessageClass(method.input_type)
        answer = message_factory.GetMessageClass(method.output_type)
        call = channel.unary_unary(
            "/pensieve.v1.ConversationService/GetServerInfo",
            request_serializer=request.SerializeToString,
            response_deserializer=answer.FromString,
        )
        assert call(request()).context_limit == 512


def test_operators_see_health_metrics_and_stats(server: ServerProcess) -> None:
    for address in (server.target, server.admin):
        with grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert health.status == health_pb2.HealthCheckResponse.SERVING
    with urlopen(f"http://{server.admin}/metrics", timeout=10) as response:
        assert b"pensieve_" in response.read()
    with grpc.insecure_channel(server.admin) as channel:
        stats = pensieve_pb2_grpc.AdminServiceStub(channel).GetStats(pb.GetStatsRequest())
    assert stats.gpu_tokens_capacity == stats.host_tokens_capacity == 512


def test_chat_reads_plain_lines_from_a_pipe(server: ServerProcess) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pensieve", "chat", "--target", server.target],
        input="My name is Ada.\n/receipt\n/quit\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "context" in done.stdout
