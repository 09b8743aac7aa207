"""Binds a session's token ids to the model, tokenizer and template that made them: to another model they mean
something else. No turn runs on another model. A session from before bindings existed is bound by its next
turn."""

from __future__ import annotations

import msgspec

from pensieve.core import TokenArray
from pensieve.errors import FailedPrecondition
from pensieve.store.records import ModelBinding, SessionConfig
from pensieve.tokenizer import ChatTokenizer

_SHOWN = 12
"""Digits of a hash shown in messages."""


class ServedModel:
    """The model that this server runs."""

    def __init__(self, name: str, model_sha256: str, tokenizer: ChatTokenizer) -> None:
        self.binding = ModelBinding(
            name=name,
            model=model_sha256,
            tokenizer=tokenizer.sha256,
            template=tokenizer.template_sha256,
        )

    def differences(self, config: SessionConfig) -> list[str]:
        """Which of ``model``, ``tokenizer`` and ``template`` differ between the session and this server."""
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
        """Raises FailedPrecondition (MODEL_MISMATCH) when the session is bound to another model."""
        differ = self.differences(config)
        if differ and config.binding is not None:
            raise mismatch(
                f"the session was made with another {' and '.join(differ)} than this server's; it can be read, or "
                "moved to this one by an update with rebind",
                differs=",".join(differ),
                session=describe(config.binding),
                serving=describe(self.binding),
            )

    def check_tokens(self, tokens: TokenArray, vocab_size: int) -> None:
        """Raises FailedPrecondition (MODEL_MISMATCH) when a token id is outside the model's vocabulary."""
        largest = int(tokens.max(initial=0))
        if largest >= vocab_size:
            raise mismatch(
                f"token id {largest} of the session is beyond the model's {vocab_size}: another model made it",
                differs="vocabulary",
                session=f"token id {largest}",
                serving=describe(self.binding),
            )

    def bound(self, config: SessionConfig) -> SessionConfig:
        return msgspec.structs.replace(config, binding=self.binding)


def mismatch(message: str, *, differs: str, session: str, serving: str) -> FailedPrecondition:
    metadata = {"differs": differs, "session_model": session, "serving_model": serving}
    return FailedPrecondition(message, reason="MODEL_MISMATCH", metadata=metadata)


def describe(binding: ModelBinding) -> str:
    """Name and short hashes: ``demo model=… tokenizer=… template=…``."""
    parts = (("model", binding.model), ("tokenizer", binding.tokenizer), ("template", binding.template))
    shown = [f"{name}={value[:_SHOWN]}" for name, value in parts if value]
    return " ".join([binding.name, *shown] if binding.name else shown)
