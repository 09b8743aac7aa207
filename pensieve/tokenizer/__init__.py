"""Text to tokens and back: chat-template deltas, incremental detokenisation, stop strings. No torch.

A new turn is rendered and tokenised once, as a delta behind the session's history. Earlier tokens are never
tokenised again: the model continues from exactly the tokens that it has read and generated::

    tokenizer = ChatTokenizer.from_folder(Path("model"))
    rendered = tokenizer.render([], [TextMessage(Role.USER, "Hello!")], generation_prompt=True)
    rendered.item_tokens      # one int32 array per new message: the glue that introduces it, its content, its closing
    rendered.generation_prompt

All methods are thread-safe.

May import: core, errors, gguf, model, speech.
"""

from pensieve.tokenizer.chat import ChatTokenizer, Rendered
from pensieve.tokenizer.delta import HistoryItem, RawMessage, RenderContext, TextMessage, TokenMessage
from pensieve.tokenizer.detokenizer import Detokenizer, StopMatcher, StopResult
from pensieve.tokenizer.template import PLAIN_TEMPLATE, TemplateError
from pensieve.tokenizer.tools import Tools

__all__ = [
    "PLAIN_TEMPLATE",
    "ChatTokenizer",
    "Detokenizer",
    "HistoryItem",
    "RawMessage",
    "RenderContext",
    "Rendered",
    "StopMatcher",
    "StopResult",
    "TemplateError",
    "TextMessage",
    "TokenMessage",
    "Tools",
]
