"""Takes back what a request has made when the service then refuses its turn."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from pensieve.client import AsyncClient
from pensieve.errors import ContextLimitExceeded, InvalidArgument, PensieveError, ResourceExhausted

_FAMILIES: Final = ("chat-", "resp-")
"""How the names of sessions begin that are made for a turn; behind it comes the turn's id."""
_PATIENCE_S: Final = 2.0


@asynccontextmanager
async def leaving_nothing(client: AsyncClient, turn_id: uuid.UUID) -> AsyncIterator[None]:
    """The block begins the turn ``turn_id``: a refusal leaves no session that was made for it.

    Only where the id is of this call alone. One made of an ``Idempotency-Key`` may have made the session, and more, in
    another try.
    """
    try:
        yield
    except (ContextLimitExceeded, InvalidArgument, ResourceExhausted):
        if turn_id.version == 4:
            # The refusal is the answer, whatever comes of this: a server that is overloaded may refuse it, too.
            with contextlib.suppress(PensieveError, TimeoutError):
                async with asyncio.timeout(_PATIENCE_S):
                    for family in _FAMILIES:
                        await client.session(f"{family}{turn_id.hex}").delete(allow_missing=True)
        raise
