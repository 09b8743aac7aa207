"""Names of options that others use for the same thing, and what is said to who uses them here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from pensieve.core import SAMPLING

NEAR = {
    **{other: name for name, row in SAMPLING.items() for other in row.near},
    "deadline": "timeout",
    "idempotency_key": "request_id",
    "logprobs": "top_logprobs",
    "metadata": "annotations",
    "request_timeout": "timeout",
}
"""Name elsewhere → name here."""

ELSEWHERE = {
    "content": "the text comes first, without a name: send('Hi')",
    "do_sample": "temperature=0 is greedy, anything above samples",
    "functions": "functions belong to the session: create_session(tools=...)",
    "history": "the server keeps it; one from elsewhere: create_session(initial_items=[('user', 'Hi'), ...])",
    "input": "the text comes first, without a name: send('Hi'); more than one item: items=[...]",
    "instructions": "it belongs to the session: create_session(system_prompt=...)",
    "message": "the text comes first, without a name: send('Hi')",
    "messages": "only what is new is sent: send('Hi'), or items=[...]; the server keeps the rest",
    "model": "it belongs to the session: create_session(model=...)",
    "prompt": "the text comes first, without a name: send('Hi')",
    "stream": "session.stream(...) streams, session.send(...) waits for the whole turn",
    "system": "it belongs to the session: create_session(system_prompt=...)",
    "system_prompt": "it belongs to the session: create_session(system_prompt=...)",
    "tools": "functions belong to the session: create_session(tools=...)",
}
"""Name elsewhere → what is done here instead, where that is no option of the same kind."""


def check_names(options: Mapping[str, object], allowed: frozenset[str]) -> None:
    """Raises TypeError, as a call with a keyword that does not exist, and says what may have been meant."""
    for name in sorted(options.keys() - allowed):
        raise TypeError(f"unknown option {name!r}{_advice(name, allowed)}")


def _advice(name: str, allowed: frozenset[str]) -> str:
    if NEAR.get(name) in allowed:
        return f": here it is {NEAR[name]!r}"
    if name in ELSEWHERE:
        return f": {ELSEWHERE[name]}"
    close = difflib.get_close_matches(name, allowed, n=1)
    return f": did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(allowed))}"
