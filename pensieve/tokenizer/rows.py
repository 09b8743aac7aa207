"""Checks a folder's chat template at start: which one it is, and that the model has an embedding for all it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol

from pensieve.core import Role, TokenArray
from pensieve.errors import InvalidArgument
from pensieve.speech import FunctionCall
from pensieve.tokenizer.delta import TextMessage
from pensieve.tokenizer.folder import TokenizerFolder, words_without_row

PROBE_TOOLS: Final = (
    '[{"type":"function","function":{"name":"look","description":"d","parameters":{"type":"object"}}}]'
)
_SYSTEM, _USER = TextMessage(Role.SYSTEM, "a"), TextMessage(Role.USER, "a")
_ANSWER = TextMessage(Role.ASSISTANT, "a")
_CALL = TextMessage(Role.ASSISTANT, "", (FunctionCall("call00000", "look", "{}"),))
_RESULT = TextMessage(Role.TOOL, "a", call_id="call00000")
_PLAIN: Final = ((_USER,), (_SYSTEM, _USER), (_USER, _ANSWER, _USER))
_WITH_TOOLS: Final = ((_USER,), (_USER, _CALL, _RESULT))


class RenderedDelta(Protocol):
    """What a rendering gives: ``ChatTokenizer.render``."""

    @property
    def item_tokens(self) -> tuple[TokenArray, ...]: ...

    @property
    def generation_prompt(self) -> TokenArray: ...


class Render(Protocol):
    """Renders messages: ``ChatTokenizer.render``."""

    def __call__(
        self, history: tuple[()], new: tuple[TextMessage, ...], *, generation_prompt: bool, tools: str = ""
    ) -> RenderedDelta: ...


def chosen_template(folder: Path, parts: TokenizerFolder) -> str | None:
    """The chat template of a folder; None when it has none.

    Raises InvalidArgument when it has several and none is the ``default``: transformers refuses these, too.
    """
    if parts.named_templates:
        names = ", ".join(parts.named_templates)
        raise InvalidArgument(
            f"{folder}: chat_template has the templates {names} and none that is called default; choose one with "
            "--chat-template FILE"
        )
    return parts.template


def require_embeddings(folder: Path, parts: TokenizerFolder, render: Render, tools: str) -> None:
    """Raises InvalidArgument, with token and file, when the template writes a word without an embedding.

    ``tools``: definitions of functions to render with as well; "" when the template takes none.
    """
    words = words_without_row(parts)
    if not words:
        return
    if parts.adds_bos and parts.bos_token_id in words:
        raise _refusal(folder, "the tokenizer begins each text with", parts.bos_token_id, parts)
    dialogues = [(dialogue, "") for dialogue in _PLAIN] + [(one, tools) for one in _WITH_TOOLS if tools]
    for messages, given in dialogues:
        try:
            rendered = render((), messages, generation_prompt=True, tools=given)
        except InvalidArgument:
            continue  # the template takes no such conversation
        for ids in (*rendered.item_tokens, rendered.generation_prompt):
            for token in ids.tolist():
                if token in words:
                    raise _refusal(folder, "the chat template writes", token, parts)


def _refusal(folder: Path, what: str, token: int, parts: TokenizerFolder) -> InvalidArgument:
    word = words_without_row(parts)[token]
    return InvalidArgument(
        f"{folder / 'tokenizer.json'}: {what} {word!r}, id {token}, but config.json: vocab_size is "
        f"{parts.vocab_size}: the model has no embedding for it"
    )
