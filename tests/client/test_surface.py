"""The public names, pinned: adding one is a decision, losing one breaks callers."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import typing
from collections.abc import Awaitable

import pytest

import pensieve
import pensieve.client as sdk
from pensieve.client._transport import CHANNEL_OPTIONS, ClientSettings
from support import sync_twin

ERRORS = """
Aborted AlreadyExists Cancelled ContextLimitExceeded DataLoss DeadlineExceeded FailedPrecondition Internal
InvalidArgument NotFound PensieveError PermissionDenied ResourceExhausted RevisionMismatch TurnFenced
TurnInProgress Unauthenticated Unavailable
"""
SDK = """
AsyncClient AsyncSession AsyncTurnStream CallingMessage Candidate Client Compaction ErasedSession ErasureReceipt
FinishReason FoundTurn FunctionCall HintReceipt InputLike Item Limits Phase Piece Progress RawText Residency
RetryPolicy Role SamplingOptions ServerInfo Session SessionChanges SessionInfo SessionState TenantTotals TokenCount
TokenLogprob TokenText ToolResult Turn TurnOptions TurnState TurnStream Usage Warming
"""
CLIENT = """close create_session erase_subject export_subject find_turn import_sessions server_info session
sessions usage"""
SESSION = """append attach cancel choose compact count_tokens delete edit export fork get_turn id info items last_turn
last_user_item name rebind refresh regenerate revision rewind send stream update warm"""
STREAM = (
    "accepted base_revision cancel close done finish progress request_id resumes seed text token_count turn"
)
TWINS = [
    (sdk.Client, sdk.AsyncClient),
    (sdk.Session, sdk.AsyncSession),
    (sdk.TurnStream, sdk.AsyncTurnStream),
]


def public(kind: type) -> list[str]:
    return sorted(name for name in dir(kind) if not name.startswith("_"))


def test_exports() -> None:
    assert set(pensieve.__all__) == {*ERRORS.split(), "AsyncClient", "Client", "__version__"}
    assert set(sdk.__all__) == set(SDK.split())
    assert pensieve.Client is sdk.Client and pensieve.AsyncClient is sdk.AsyncClient
    assert pensieve.__version__ == "0.2.0"
    assert all(
        getattr(pensieve, name) and getattr(sdk, other) for name in ERRORS.split() for other in SDK.split()
    )
    with pytest.raises(AttributeError, match="no attribute 'Clint'"):
        _ = pensieve.Clint


@pytest.mark.parametrize(("twins", "names"), list(zip(TWINS, (CLIENT, SESSION, STREAM), strict=True)))
def test_methods_of_both_twins(twins: tuple[type, type], names: str) -> None:
    for twin in twins:
        assert public(twin) == sorted(names.split())
    for name in (*names.split(), "__init__"):
        blocking, awaited = (inspect.getattr_static(twin, name) for twin in twins)
        if not callable(blocking):
            continue
        ours, theirs = (
            [str(one) for one in inspect.signature(method).parameters.values()]
            for method in (blocking, awaited)
        )
        assert ours == [re.sub(r"\bAsync(?=[A-Z])", "", one) for one in theirs], name


HANDLES = {"session", "stream", "attach", "export", "export_subject"}
"""Make no call yet, so there is nothing to wait for; what they return is of the same side."""


@pytest.mark.parametrize("twins", TWINS, ids=lambda twins: twins[0].__name__)
def test_what_blocks_on_one_side_is_awaited_on_the_other(twins: tuple[type, type]) -> None:
    for name in public(twins[0]):
        blocking, awaited = (inspect.getattr_static(twin, name) for twin in twins)
        assert type(blocking) is type(awaited), name
        if not inspect.isfunction(blocking):
            assert blocking is awaited, f"{name}: what needs no call is the same for both"
            continue
        result = typing.get_type_hints(awaited)["return"]
        awaitable = inspect.iscoroutinefunction(awaited) or issubclass(
            typing.get_origin(result) or result, Awaitable
        )
        assert awaitable is (name not in HANDLES), name
        told = [
            re.sub(r"await |Async(?=[A-Z])", "", inspect.getdoc(one) or "")
            .partition("Takes effect at once")[0]
            .rstrip()
            for one in (blocking, awaited)
        ]
        assert told[0] == told[1], name
    for one, other in (("enter", "aenter"), ("exit", "aexit"), ("iter", "aiter"), ("next", "anext")):
        assert hasattr(twins[0], f"__{one}__") == hasattr(twins[1], f"__{other}__"), one


def test_the_blocking_client_is_what_the_generator_writes() -> None:
    assert sync_twin.TWIN.read_text() == sync_twin.twin(sync_twin.SOURCE.read_text()), "run `make twin`"


def test_import_costs_neither_grpc_nor_torch() -> None:
    code = (
        "import sys, pensieve; print([m for m in ('grpc', 'torch', 'google.protobuf') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_the_sdk_does_not_import_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import pensieve.client, pensieve.cli.chat"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_channel_options() -> None:
    options = dict(CHANNEL_OPTIONS)
    assert (
        options["grpc.http2.ping_timeout_ms"] == 20_000
    )  # Keepalive alone takes a minute to see a dead peer.
    assert options["grpc.keepalive_time_ms"] >= 20_000  # Servers allow no more frequent pings than that.
    assert options["grpc.max_receive_message_length"] == 16 * 1024 * 1024
    assert options["grpc.enable_retries"] == 0
    own = dict(ClientSettings("x", options=[("grpc.keepalive_time_ms", 1)]).channel_options)
    assert own == {**options, "grpc.keepalive_time_ms": 1}


def test_targets_and_credentials() -> None:
    assert ClientSettings("pensieve://h:1").address == ClientSettings("h:1").address == "h:1"
    assert ClientSettings("h:1").channel_credentials is None
    assert ClientSettings("h:1", tls=True).channel_credentials is not None
    assert ClientSettings("h:1", more_metadata=[("a", "b")]).metadata("") == [("a", "b")]
    assert ClientSettings("h:1", api_key="ck_1").metadata("sessions/a") == [
        ("x-session-route", "sessions/a"),
        ("authorization", "Bearer ck_1"),
    ]
