"""Names of log events that are older than the wording of their messages.

In JSON logs ``event`` is the message template. Programs filter by it, so a reworded template keeps its event name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

EVENT_NAMES: Final[Mapping[str, str]] = {
    "%d log lines were dropped: stderr was blocked": "%d log lines were dropped: nothing took them",
    "%s %s revision %d, which this server or its client has seen there": "%s %s revision %d, which was seen there",
    "%s is large: run `pensieve store check` to check all of it": (
        "%s is large: `pensieve store check` looks over all of it"
    ),
    "%s was damaged and was replaced by a new file with its %d sessions; %d of them "
    "have lost records; the damaged file is kept as %s": (
        "%s was damaged: a new file with its %d sessions is in its place, %d of them "
        "have lost records; the damaged one is kept as %s"
    ),
    "%s went back in time: %d changes of %d sessions that this server had acknowledged are lost": (
        "%s went back in time: %d changes that this server had acknowledged are gone, of %d sessions"
    ),
    "all-reduce uses NCCL: symmetric memory is not available: %s": (
        "sums over ranks go by NCCL, since there is no symmetric memory: %s"
    ),
    "an abandoned ping ended with %s": "a ping that was given up ended with %s",
    "another program reads %s and keeps its write-ahead log at %d bytes": (
        "another program reads %s and keeps its log of changes at %d bytes"
    ),
    "cannot read the unsent line of %s: %s": "what was kept of %s cannot be read: %s",
    "connections cannot be accepted, no file descriptor is free: %s": (
        "connections wait, no more files can be opened: %s"
    ),
    "cost profile: estimated, because %s": "cost profile: estimated, since %s",
    "cost profile: none stored for this model on %s; measuring one for a few seconds": (
        "cost profile: none stored for this model on %s; measuring one, a few seconds"
    ),
    "engine exits: %s": "engine leaves: %s",
    "finishing the rebuild of %s that was interrupted": "the renewal of %s is ended, which was begun before",
    "migrating the history file from schema %d to %d: older programs can no longer open it": (
        "bringing the history file from schema %d to %d: older programs cannot open it then"
    ),
    "reaped an orphaned process": "a process that was left to this one has ended",
    "rebuilding the history file: %s, %d of %s": "renewing the history file: %s, %d of %s",
    "recording is paused until the disk takes writes: %s": "recording pauses until the disk takes it: %s",
    "recording resumed; %d turns are missing": "recording goes on; %d turns are missing in it",
    "replacing the stored cost profile, which cannot be used: %s": (
        "the stored cost profile cannot be used and is replaced: %s"
    ),
    "step does not fit its graph: %s": "step for which another way must be found: %s",
    "the certificate could not be read again; the present one stays in use: %s": (
        "certificate not read again, the one in force stays: %s"
    ),
    "the history file contradicted its records: derived rows of %d sessions are rebuilt": (
        "the history file contradicted its records: what is derived of %d sessions is made again"
    ),
    "the history file contradicts the records of session %r of tenant %r: its derived rows are rebuilt": (
        "the history file contradicts the records of session %r of tenant %r: what is "
        "derived of them is made again"
    ),
    "the history file is closed until its content is proven: %s": (
        "the history file is closed until it is proven what it holds: %s"
    ),
    "the history file is open again, and its content is on the disk": (
        "the history file is open again, and what it says is on the disk"
    ),
    "the key file could not be read again; the present keys stay in force: %s": (
        "key file not read again, the keys in force stay: %s"
    ),
    "the marks of erased turns stay in the index: %s": (
        "what erased turns were found by stays in the index: %s"
    ),
    "the model produced logits that are not finite; check its weights and dtype": (
        "the model gave logits that are not finite; its weights or its dtype may be at fault"
    ),
    "the service manager could not be notified of %s: %s": "the service manager was not told %s: %s",
    "the store's ping raised an unexpected error": "the store's ping failed in a way it should not",
    "the unsent line is kept in memory only: %s": "what was typed is kept in memory only: %s",
    "the usage of tenants cannot be read from the history store: %s": (
        "the history store does not tell what tenants store: %s"
    ),
    "the write-ahead log of %s was deleted while in use: saving its content": (
        "the log of changes of %s was deleted while in use: what is in it is saved"
    ),
}
"""Message template → the name of its event."""
