"""The options of turns and sessions: with ``core.SamplingOptions`` the only place where each has its unit and meaning.

What stands below a key is shown by editors, and by ``help`` of every method that takes the table (``signatures``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from pensieve.client.arguments.signatures import documented
from pensieve.core import SAMPLING, SamplingOptions

Tools = str | Sequence[Mapping[str, Any]]
"""Definitions of functions, ``{"type": "function", "function": {"name", "description", "parameters"}}`` each, or all of
them as the text of a JSON array."""
Overflow = Literal["reject", "drop_oldest_turns", "drop_oldest"]
"""The last two are the same."""
Keep = Literal["partial", "nothing"]
OnDisconnect = Literal["cancel", "finish"]


documented(SamplingOptions)


@documented
class TurnOptions(SamplingOptions, total=False):
    """Everything that may go with a turn beside its input."""

    request_id: str
    """Names the turn within its session: the same id and content never append twice. A UUID, or a name of 1 to 128
    characters, from which a UUID is made; left out: a fresh one."""
    expected_revision: int | None
    """Raise RevisionMismatch unless the session is at this revision; None: whatever it is at."""
    replace_after_item: int
    """Replace everything after this item, in the same commit as the new turn."""
    token_ids: bool
    """Whether pieces carry token ids; default True."""
    top_logprobs: int
    """Log-probabilities of so many of the likeliest tokens at each place; 0: of the chosen one only; default: none."""
    max_chunk_tokens: int
    """A piece has at most so many tokens; default: as many as there are when it is sent."""
    max_chunk_delay: float
    """Seconds that tokens may wait to be sent together."""
    pad_chunks: bool
    """Make messages alike in size, so that their sizes tell nobody on the way what is said."""
    max_duration: float
    """Seconds after which the server ends the turn as TIME_LIMIT, committed."""
    priority: int
    """Among the turns of the same tenant: each level counts as ten seconds of waiting; default 0."""
    next_turn_in: float
    """Hint: seconds from the end of this turn to the next one, as expected. ``Turn.hints`` says what was taken."""
    importance: float
    """Hint: worth of the session's cached state after this turn, against 1 for any other session."""
    session_finished: bool
    """Hint: no further turn is expected."""
    annotations: Mapping[str, str]
    """Kept with the turn and given back with it (``Turn.annotations``); the model never sees them."""
    mark: str
    """By this, also together with its answer, ``find_turn`` finds the turn once it is committed."""
    must_call: str
    """Begin the answer as a call of this function of the session's, or of any if empty. The arguments are the model's
    own."""
    turn_system_prompt: str
    """In place of the session's system prompt, for this turn alone; the session keeps its own."""
    turn_tools: Tools
    """Functions that the model may call, in place of the session's, for this turn alone."""
    single_call: bool
    """End the answer with its first whole call of a function."""
    on_disconnect: OnDisconnect
    """What becomes of the turn when this client goes away for good; default ``cancel``."""
    timeout: float
    """Seconds for the whole turn, resumes included; then DeadlineExceeded, and nothing is committed."""
    wait_if_busy: bool
    """Wait for another turn of this session to end, instead of raising TurnInProgress."""


@documented
class SessionChanges(TypedDict, total=False):
    """What may be changed of a session."""

    labels: Mapping[str, str]
    """In place of all labels that it has."""
    system_prompt: str
    """What the model is told first."""
    default_sampling: SamplingOptions
    """For turns that do not say otherwise, in place of all defaults before."""
    ttl: float
    """Seconds without use after which the session is erased; 0: never."""
    overflow: Overflow
    """What happens to a turn that does not fit the context: refuse it, or leave the oldest turns out of the context."""
    share_prefixes: bool
    """Whether cached state of common beginnings is shared with other sessions of the tenant."""
    tools: Tools
    """Functions that the model may call, in place of those before; an empty list or text: none."""
    rebind: bool
    """Move the session to the model that is served: ``Session.rebind``."""


SAMPLING_KEYS = frozenset(SAMPLING)
TURN_KEYS = frozenset(TurnOptions.__annotations__)
CHANGE_KEYS = frozenset(SessionChanges.__annotations__)
