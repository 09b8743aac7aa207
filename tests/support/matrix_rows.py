"""Rows of the fault matrix: what goes wrong, and what has to hold then."""

from __future__ import annotations

from typing import Final

GROUPS: Final = (
    ("Clients and network", 1, 15),
    ("Input", 16, 24),
    ("Server, engine and device", 25, 36),
    ("History store", 37, 54),
    ("Security", 55, 58),
    ("HTTP door", 59, 60),
    ("Operators and their machines", 61, 64),
    ("Forms of answers", 65, 65),
    ("Compaction", 66, 66),
)
"""Title, first row, last row."""

ROWS: Final[dict[int, tuple[str, str]]] = {
    1: (
        "A client leaves in the middle of a turn and sends the next one at once",
        "It is told that a turn runs, or goes on from the revision before; the context is exact, nothing leaks",
    ),
    2: (
        "A connection breaks and the client comes back with what it has",
        "No token is missing or doubled; the text is that of an unbroken stream",
    ),
    3: (
        "A client with a hundred streams is killed",
        "All its turns and their cache are let go after the grace time",
    ),
    4: (
        "A client stands still and reads no more",
        "Its connection is given up within the keepalive and ping times",
    ),
    5: (
        "A connection is half-open: what is sent gets lost on both ways",
        "The client notices the silence and sends the turn again; the turn is there once",
    ),
    6: (
        "Many clients read very slowly",
        "Others are not held up, little is buffered, the slow ones get the right answer in the end",
    ),
    7: (
        "A write to a client is blocked when that client cancels, runs out of time or dies",
        "The turn ends, and what it held is let go",
    ),
    8: ("The same request fifty times at once, on several servers", "One turn, and the same answer for all"),
    9: ("A late repetition of a turn that others have followed", "Its own answer again; nothing is appended"),
    10: ("A request id is used again for something else", "Refused: REQUEST_ID_REUSED"),
    11: (
        "A deadline passes in the queue, in a prefill, while decoding or at the commit",
        "The history stands before the turn or behind it, never between",
    ),
    12: (
        "Turns are cancelled at any moment",
        "What they held is free again and the books of the cache are exact",
    ),
    13: ("The answer is lost after the commit", "The retry gets the turn that was committed"),
    14: (
        "A server dies in mid-stream, seen directly or through proxies that report it in ways of their own",
        "The SDK sends the turn again in each case",
    ),
    15: ("All servers are down, and come back", "UNAVAILABLE meanwhile; the SDK goes on by itself"),
    16: (
        "Random and mutated bytes as a request",
        "INVALID_ARGUMENT with REQUEST_MALFORMED, never an error of ours",
    ),
    17: (
        "Small messages that become large: millions of empty parts, deep nesting",
        "Refused, and memory stays bounded",
    ),
    18: (
        "Strange text: broken UTF-8, half a surrogate pair, control strings of the template",
        "It comes back as it was; text is never taken for control tokens; pieces are whole code points",
    ),
    19: (
        "Text that is huge, or hard for the tokenizer",
        "Refused by its length or tokenised beside the event loop; others go on meanwhile",
    ),
    20: ("Token ids outside the vocabulary, or a million of them", "Refused before the engine sees them"),
    21: (
        "Sampling values that are not numbers, infinite, negative or contradictory",
        "Refused or well defined; no NaN reaches the sampler",
    ),
    22: ("Names that belong to others, climb folders or carry braces", "Not found or refused, alike"),
    23: (
        "Page tokens that are forged, of another tenant or another query",
        "Refused without showing anything",
    ),
    24: (
        "A context at the limit, one below, one above; one larger than the whole cache",
        "Served or refused at once, never waited for",
    ),
    25: (
        "A server is killed in each phase of a turn",
        "The retry, here or on another server, gives exactly one turn",
    ),
    26: (
        "A server is paused for longer than its lease and goes on",
        "Its commit is refused; the turn that overtook it stands",
    ),
    27: (
        "SIGKILL ends the engine process",
        "The server ends running turns with ENGINE_RESTARTING and starts a new engine. The new engine computes a "
        "session's state again when its next turn comes. A repeated turn has the same seed as before; with --invariant "
        "the new engine chooses the same tokens",
    ),
    28: ("The engine hangs", "It is noticed while work waits, and the engine is replaced"),
    29: ("A step fails on the device", "The engine process ends; it never carries on"),
    30: (
        "Memory of the device or the host runs out",
        "What does not fit is refused before, or costs the step and not the server",
    ),
    31: ("The host tier is full", "Attention state is dropped and computed again; history is not touched"),
    32: (
        "SIGTERM under load",
        "New turns are refused, running ones finish, health changes at once, exit status 0",
    ),
    33: ("A second server on the same port or the same file", "It refuses to start and says why"),
    34: (
        "File descriptors run out",
        "New connections wait or fail; the server goes on when there are some again",
    ),
    35: (
        "Ten times the load that can be served",
        "Refused in time, with a hint when to come back; memory and the admitted turns stay as they are",
    ),
    36: ("One tenant floods the server", "Others keep their share"),
    37: ("A server on SQLite is killed amid commits", "No acknowledged turn is lost, none is torn"),
    38: (
        "The disk is full under SQLite",
        "Writes are refused, reads go on, all is well when there is room again",
    ),
    39: (
        "The disk fails under SQLite: fsync, write, read",
        "Nothing is acknowledged that is not proven to be on the disk; the file is opened afresh",
    ),
    40: (
        "SQLite is locked, or a long reader lets its log grow",
        "Waited for within bounds, or UNAVAILABLE; the log stays bounded",
    ),
    41: (
        "Redis is killed under load and started again",
        "No acknowledged turn is lost at the level of durability that was asked for",
    ),
    42: ("Redis comes back on an earlier state", "HISTORY_REGRESSED, and nothing is built on it"),
    43: (
        "A byte of a stored record is changed",
        "The checksum finds it: HISTORY_CORRUPT, the session is readable and takes no writes",
    ),
    44: (
        "The disk is full under Redis that syncs every second",
        "Writes are refused, reads go on, all is well when there is room again",
    ),
    45: (
        "The disk is full under Redis that syncs each write: it exits",
        "STORE_UNAVAILABLE until it is back; nothing acknowledged is lost",
    ),
    46: ("A reply of Redis is lost after its script ran", "The change is made exactly once"),
    47: (
        "Redis is away for a while, or comes back empty or as another one",
        "Commits wait or are refused; an emptied store is no store without sessions",
    ),
    48: (
        "Sentinel fails over to a replica",
        "What was acknowledged with replicas asked for is there; a loss is noticed otherwise",
    ),
    49: (
        "Redis may evict, or its memory is full",
        "The first is refused at the start, the second is STORE_FULL",
    ),
    50: (
        "Redis has forgotten its scripts, loads, is busy or has become a replica",
        "Done again, or UNAVAILABLE",
    ),
    51: (
        "Clocks jump by an hour",
        "Leases are not affected on the server; a jump of the store's clock costs waiting, never a turn",
    ),
    52: ("Two servers race for one session", "One turn at a time; none is lost or doubled"),
    53: ("The store was written by a newer version", "No writes; said at the start"),
    54: (
        "Tokenizer, template or model have changed under a session",
        "It is noticed, and said, before anything is built on it",
    ),
    55: (
        "Each method with no credential, a wrong one or one without the scope",
        "Refused; a new method without a rule fails the tests",
    ),
    56: ("Text of users in logs, metrics, traces or errors", "It is in none of them"),
    57: ("Two tenants with the same text", "Neither finds the other's attention state"),
    58: ("Guessing names by how they are refused", "Unknown and foreign sessions are answered alike"),
    59: (
        "The HTTP door is killed, or stands still, in the middle of an answer",
        "It is noticed, and another is started; the turn runs on, and its stream is taken up where it was cut",
    ),
    60: (
        "Callers of the HTTP door without keys: one floods, one says that it is somebody else",
        "Each address has limits of its own; only a proxy that is named may say for whom it calls",
    ),
    61: (
        "Nobody reads a server's log: its collector stands still, its terminal is paused, its reader is gone",
        "The server goes on; lines wait for a reader, and beyond ten thousand they are dropped and counted",
    ),
    62: (
        "A history file is known by several names, or its lock file is deleted",
        "One server at a time has it, and by a link it is kept as by its own name",
    ),
    63: (
        "The log of changes of a SQLite file is deleted while it is in use",
        "What was acknowledged is saved from it, and the server goes on",
    ),
    64: (
        "Policy, password or rights of a Redis are changed while it serves, or a key of a listing is taken",
        "What cannot be kept is refused with the reason, health says so, and it serves again when that is put right",
    ),
    65: (
        "The grammar of an answer needs too much work, or the library that follows it fails",
        "Its turn ends with `GRAMMAR_TOO_COSTLY`, alone; no other turn waits for its tokens",
    ),
    66: (
        "Server, engine or HTTP door are killed in a compaction, or a client's turn comes first",
        "The context is the old or the new one, the old one is in a fork, and a repeated call compacts once",
    ),
}

UNTESTED: Final[dict[int, str]] = {}
"""Why no test provokes a row."""
