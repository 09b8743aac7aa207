"""A cache of transformers that encodes and decodes what it gets, so that its attention sees what ours sees."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from pensieve.kernels.kv_codec import decode, encode


class CodedCache(DynamicCache):
    """Each key and value vector of a head becomes what its code decodes to before attention reads it."""

    def __init__(self, code: torch.dtype, config: Any) -> None:
        super().__init__(config=config)
        self._code = code

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both = [decode(*encode(states, self._code), states.dtype) for states in (key_states, value_states)]
        updated: tuple[torch.Tensor, torch.Tensor] = super().update(*both, *args, **kwargs)
        return updated
