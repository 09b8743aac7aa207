"""What a shell may complete that a server has to be asked for."""

from __future__ import annotations

from click import Context, Parameter
from click.shell_completion import CompletionItem

PATIENCE_S = 1.0
"""Whoever has pressed Tab waits for no more."""
MOST = 100


def complete_session_ids(ctx: Context, param: Parameter, incomplete: str) -> list[CompletionItem]:
    """Ids of sessions at ``--target``, as they are listed; none without a target, or where it does not answer."""
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
            timeout=PATIENCE_S,
            retry=once,
        ) as client:
            ids = [info.name.rpartition("/")[2] for info in client.sessions(limit=MOST)]
    except (PensieveError, ValueError):
        return []  # a shell that is typing into is no place for a message
    return [CompletionItem(one) for one in ids if one.startswith(incomplete)]
