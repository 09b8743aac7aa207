"""Read-only state shared by the blocking and the asyncio classes of turn streams and session handles."""

from __future__ import annotations

from pensieve.client._flows import SessionCore
from pensieve.client._requests import session_name
from pensieve.client._transport import ClientSettings
from pensieve.client._turn_machine import TurnMachine
from pensieve.client._values import Progress, SessionInfo, Turn
from pensieve.tracing import ClientSpan


class StreamView:
    """The state of a turn's stream, as its reader sees it. Both clients' streams extend it."""

    def __init__(self, core: SessionCore, machine: TurnMachine) -> None:
        self._core = core
        self._machine = machine
        self._discard_on_close = machine.discard_on_close
        self._started = False
        self._span = ClientSpan()
        self._closed = False
        """The turn is complete, failed or closed: no call is open and none will be opened."""

    @property
    def request_id(self) -> str:
        """The turn's request id, with which ``get_turn`` or ``attach`` can fetch its outcome later."""
        return self._machine.request_id

    @property
    def turn(self) -> Turn:
        """The finished turn. Raises Cancelled if it is not complete."""
        return self._machine.result()

    @property
    def done(self) -> bool:
        """Whether the turn is complete, and therefore durable."""
        return self._machine.done

    @property
    def text(self) -> str:
        """The answer so far, also after a restart; of several candidates the first, until one is committed."""
        return self._machine.text

    @property
    def token_count(self) -> int:
        """Output tokens received so far; with several candidates: of the first."""
        return self._machine.token_count

    @property
    def progress(self) -> Progress | None:
        """The server's latest report on the turn's phase."""
        return self._machine.progress

    @property
    def seed(self) -> int | None:
        """The turn's random seed; None until the server has accepted the turn."""
        return self._machine.seed

    @property
    def base_revision(self) -> int | None:
        """Session revision that the turn builds on; None until the server has accepted the turn."""
        return self._machine.base_revision

    @property
    def resumes(self) -> int:
        """Number of times that the turn was sent again."""
        return self._machine.resumes

    def _mark_closed(self) -> bool:
        """Mark the stream as closed. Return whether to tell the server to discard the turn."""
        if self._closed:
            return False
        self._closed = True
        discard = self._started and self._discard_on_close and not self._machine.done
        self._core.on_turn_end(self._machine)
        self._span.end({"pensieve.complete": self._machine.done, "pensieve.resumes": self._machine.resumes})
        if discard:
            self._core.abandon(self.request_id)
        return discard

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._core.running, self._core.running_stream = self.request_id, self._machine.stream_id
            self._span.start({"pensieve.session": self._core.name, "pensieve.request_id": self.request_id})


class SessionView:
    """Read-only view of a session handle."""

    def __init__(self, settings: ClientSettings, name_or_id: str, info: SessionInfo | None = None) -> None:
        self._core = SessionCore(settings, session_name(name_or_id), info)

    @property
    def name(self) -> str:
        """``sessions/{id}``."""
        return self._core.name

    @property
    def id(self) -> str:
        return self._core.name.removeprefix("sessions/")

    @property
    def info(self) -> SessionInfo | None:
        """Metadata as last seen. None if the session was opened by name and not refreshed yet."""
        return self._core.info

    @property
    def revision(self) -> int | None:
        """Newest revision that this handle has seen."""
        return self._core.revision

    @property
    def last_turn(self) -> Turn | None:
        """Newest finished turn of this handle."""
        return self._core.last_turn

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} revision={self.revision}>"
