"""What is said in a request: roles, and texts that may come in parts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from pensieve.client import Role
from pensieve.http.common.failures import bad, unsupported

ROLES = {"system": Role.SYSTEM, "developer": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT}
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


Content = str | list[ContentPart] | None


@dataclass(frozen=True, slots=True)
class Said:
    """One message: who, and the whole text."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation as a client tells it."""

    system: str
    """System and developer messages before anything else, joined by empty lines."""
    history: tuple[Said, ...]
    """Up to the last answer."""
    new: tuple[Said, ...]
    """What came after it."""
    drops_oldest: bool = False
    """Whether it is held in a session that drops its oldest turns: others do not go on in one."""

    @property
    def mark(self) -> str:
        """Names all that is said before the answer, for the service to find the turn by."""
        return self._named(b"", self.history, self.new)

    @property
    def end(self) -> tuple[str, str] | None:
        """Mark and text of the last answer of the history; None: there is none."""
        if not self.history:
            return None
        return self._named(b"", self.history[:-1]), self.history[-1].text

    def before(self, scope: bytes) -> bytes:
        """Names the history, for one caller."""
        return bytes.fromhex(self._named(scope, self.history))

    def after(self, scope: bytes, answer: str) -> bytes:
        """Names what will be the history once ``answer`` is in it, for one caller."""
        return bytes.fromhex(self._named(scope, self.history, self.new, (Said(Role.ASSISTANT, answer),)))

    def _named(self, scope: bytes, *parts: tuple[Said, ...]) -> str:
        kind = b"drops" if self.drops_oldest else b""
        return digest(scope + kind, self.system, (one for part in parts for one in part)).hex()


def text_of(content: Content, param: str) -> str:
    """The text of a content. Raises HttpFailure for parts that are no text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        if part.type not in TEXT_PARTS:
            raise unsupported(
                f"{param}[{number}]", f"parts of type {part.type!r} are not supported: text only"
            )
        text = part.text if part.text is not None else part.refusal
        if text is None:
            raise bad(f"{param}[{number}].text", "is missing", "missing_required_parameter")
        texts.append(text)
    return "".join(texts)


def said(role: str, content: Content, param: str) -> Said:
    """One message of a request."""
    if role not in ROLES:
        raise unsupported(f"{param}.role", f"{role!r} is not supported: one of {', '.join(ROLES)}")
    if content is None and ROLES[role] is not Role.ASSISTANT:
        raise bad(f"{param}.content", "is missing", "missing_required_parameter")
    return Said(ROLES[role], text_of(content, f"{param}.content"))


def talk_of(messages: Sequence[Said], param: str) -> Talk:
    """System prompt, history and new messages. Raises HttpFailure when there is nothing to answer."""
    first = next((n for n, one in enumerate(messages) if one.role is not Role.SYSTEM), len(messages))
    last = max((n for n, one in enumerate(messages) if one.role is Role.ASSISTANT), default=first - 1)
    new = tuple(messages[last + 1 :])
    if not new:
        raise bad(param, "there is nothing to answer: the last message must not be the assistant's")
    system = "\n\n".join(one.text for one in messages[:first])
    return Talk(system, tuple(messages[first : last + 1]), new)


def digest(scope: bytes, system: str, messages: Iterable[Said]) -> bytes:
    """Names what was said, for one caller: blake2b over lengths and bytes, so that no two talks run together."""
    found = hashlib.blake2b(scope, digest_size=16)
    for role, text in ((Role.SYSTEM, system), *((one.role, one.text) for one in messages)):
        data = text.encode("utf-8", "surrogatepass")
        found.update(b"%d:%d:" % (role, len(data)))
        found.update(data)
    return found.digest()
