"""The meaning of a session's token ids: the model, tokenizer and template that they were made with.

A history is token ids. Given to another model they are read as something else, or as nothing at all; so each session
says what its ids belong to, and no turn runs where something else is served. A session of the time before that was kept
is bound by its next turn.
"""

from __future__ import annotations

import msgspec

from pensieve.core import TokenArray
from pensieve.errors import FailedPrecondition
from pensieve.store.records import ModelBinding, SessionConfig
from pensieve.tokenizer import ChatTokenizer

_SHOWN = 12
"""Digits of a hash that messages show."""


class ServedModel:
    """The model that this server runs, as sessions are bound to it."""

    def __init__(self, name: str, model_sha256: str, tokenizer: ChatTokenizer) -> None:
        self.binding = ModelBinding(
            name=name,
            model=model_sha256,
            tokenizer=tokenizer.sha256,
            template=tokenizer.template_sha256,
        )

    def differences(self, config: SessionConfig) -> list[str]:
        """Which of ``model``, ``tokenizer`` and ``template`` the session was made with another of."""
        bound = config.binding
        if bound is None:
            return []
        pairs = (
            ("model", bound.model, self.binding.model),
            ("tokenizer", bound.tokenizer, self.binding.tokenizer),
            ("template", bound.template, self.binding.template),
        )
        return [name for name, theirs, ours in pairs if theirs and ours and theirs != ours]

    def check(self, config: SessionConfig) -> None:
        """Raises FailedPrecondition (MODEL_MISMATCH) when the session belongs to something else than is served."""
        differ = self.differences(config)
        if differ and config.binding is not None:
            raise mismatch(
                f"the session was made with another {' and '.join(differ)} than is served here; it can be read, and "
                "moved by an update that says rebind",
                differs=",".join(differ),
                session=describe(config.binding),
                serving=describe(self.binding),
            )

    def check_tokens(self, tokens: TokenArray, vocab_size: int) -> None:
        """Raises FailedPrecondition (MODEL_MISMATCH) when a token id is none of the model's."""
        largest = int(tokens.max(initial=0))
        if largest >= vocab_size:
            raise mismatch(
                f"the session holds token id {largest}, and the model has only {vocab_size}: it was made with another",
                differs="vocabulary",
                session=f"token id {largest}",
                serving=describe(self.binding),
            )

    def bound(self, config: SessionConfig) -> SessionConfig:
        """``config`` of a session whose ids are of this model."""
        return msgspec.structs.replace(config, binding=self.binding)


def mismatch(message: str, *, differs: str, session: str, serving: str) -> FailedPrecondition:
    """``differs``: comma-separated; ``session`` and ``serving``: what each of both is."""
    metadata = {"differs": differs, "session_model": session, "serving_model": serving}
    return FailedPrecondition(message, reason="MODEL_MISMATCH", metadata=metadata)


def describe(binding: ModelBinding) -> str:
    """Name and hashes, short: ``demo model=… tokenizer=… template=…``."""
    parts = (("model", binding.model), ("tokenizer", binding.tokenizer), ("template", binding.template))
    shown = [f"{name}={value[:_SHOWN]}" for name, value in parts if value]
    return " ".join([binding.name, *shown] if binding.name else shown)
