"""The Python SDK: ``Client`` blocks, ``AsyncClient`` is its twin for asyncio. Imports without torch.

A turn passes through four layers. ``_requests`` builds its message under a fresh request id. ``_turn_machine``
decides what to send and how to react to each message or failure. ``_sync_link`` or ``_aio_link`` does the I/O
on a channel. ``decode`` turns responses into values. Unary calls are in ``_flows``, the keyword options in
``arguments``, lines of exports in ``_exports``. Errors are the classes of ``pensieve.errors``.

May import: core, errors, renewed_files, rpc_status, speech, tracing, v1.
"""

from pensieve.client._aio import AsyncClient, AsyncSession
from pensieve.client._aio_link import AsyncTurnStream
from pensieve.client._requests import InputLike, RawText
from pensieve.client._retry import RetryPolicy
from pensieve.client._sync import Client, Session
from pensieve.client._sync_link import TurnStream
from pensieve.client._values import (
    CallingMessage,
    Candidate,
    Compaction,
    ErasedSession,
    ErasureReceipt,
    FinishReason,
    FoundTurn,
    Item,
    Limits,
    Phase,
    Piece,
    Progress,
    Residency,
    Role,
    ServerInfo,
    SessionInfo,
    SessionState,
    TenantTotals,
    TokenCount,
    ToolResult,
    Turn,
    TurnState,
    Warming,
)
from pensieve.client.arguments import SessionChanges, TurnOptions
from pensieve.core import HintReceipt, SamplingOptions, TokenLogprob, TokenText, Usage
from pensieve.speech import FunctionCall

__all__ = [
    "AsyncClient",
    "AsyncSession",
    "AsyncTurnStream",
    "CallingMessage",
    "Candidate",
    "Client",
    "Compaction",
    "ErasedSession",
    "ErasureReceipt",
    "FinishReason",
    "FoundTurn",
    "FunctionCall",
    "HintReceipt",
    "InputLike",
    "Item",
    "Limits",
    "Phase",
    "Piece",
    "Progress",
    "RawText",
    "Residency",
    "RetryPolicy",
    "Role",
    "SamplingOptions",
    "ServerInfo",
    "Session",
    "SessionChanges",
    "SessionInfo",
    "SessionState",
    "TenantTotals",
    "TokenCount",
    "TokenLogprob",
    "TokenText",
    "ToolResult",
    "Turn",
    "TurnOptions",
    "TurnState",
    "TurnStream",
    "Usage",
    "Warming",
]
