"""Shell completion of values that only a server knows."""

from __future__ import annotations

from click import Context, Parameter
from click.shell_completion import CompletionItem

TIMEOUT_S = 1.0
"""Completion must not keep the user waiting after Tab."""
MAX_IDS = 100


def complete_session_ids(ctx: Context, param: Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete ids of sessions at ``--target``; none without a target or if the server does not answer."""
    from pensieve.client import Client, RetryPolicy
    from pensieve.errors import PensieveError

    target = ctx.params.get("target")
    if not target:
        return []
    once = RetryPolicy(max_attempts=1)
    try:
        with Client(
            target,
            api_key=ctx.params.get("api_key"),
            tls=bool(ctx.params.get("tls")),
            timeout=TIMEOUT_S,
            retry=once,
        ) as client:
            ids = [info.name.rpartition("/")[2] for info in client.sessions(limit=MAX_IDS)]
    except (PensieveError, ValueError):
        return []  # a message would garble the line that is being typed
    return [CompletionItem(session_id) for session_id in ids if session_id.startswith(incomplete)]
