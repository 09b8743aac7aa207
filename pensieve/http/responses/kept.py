"""What was asked for with a response, kept with its turn: whoever reads it later is told what its maker was told."""

from __future__ import annotations

import base64
import zlib
from typing import Final

import msgspec

from pensieve.client import Turn
from pensieve.http.responses.ids import ResponseId, conversation_id
from pensieve.http.responses.requests import ResponseRequest

_NAME: Final = "http.response"
"""Of the turn's annotation. Its value is JSON; a long one is compressed, for tools are told with every turn."""
_LONG: Final = 1024
_COMPRESSED: Final = "zlib:"


class KeptResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of a response, all that the history itself does not say."""

    created: int
    """Seconds since the epoch."""
    model: str
    """As it was served."""
    asked: ResponseRequest
    """The request without its input, which the history has."""

    @property
    def annotations(self) -> dict[str, str]:
        """To go with the turn."""
        asked = msgspec.structs.replace(self.asked, input=None, stream=False)
        data = msgspec.json.encode(msgspec.structs.replace(self, asked=asked))
        if len(data) > _LONG:
            return {_NAME: _COMPRESSED + base64.b85encode(zlib.compress(data)).decode()}
        return {_NAME: data.decode()}

    @classmethod
    def of(cls, turn: Turn) -> KeptResponse | None:
        """None: the turn was made before this was kept, by a door that keeps it in another form, or without a door."""
        value = turn.annotations.get(_NAME)
        if value is None:
            return None
        try:
            if value.startswith(_COMPRESSED):
                value = zlib.decompress(base64.b85decode(value.removeprefix(_COMPRESSED))).decode()
            return msgspec.json.decode(value, type=cls)
        except (msgspec.MsgspecError, ValueError, zlib.error):
            return None


def guessed(found: ResponseId, model: str, turn: Turn) -> KeptResponse:
    """What the id and the history say, for a turn with nothing kept."""
    times = [item.create_time for item in turn.items if item.create_time is not None]
    asked = ResponseRequest(
        background=found.background,
        truncation="auto" if found.drops_oldest else None,
        conversation=conversation_id(found.session_id),
    )
    return KeptResponse(int(times[0].timestamp()) if times else 0, model, asked)
