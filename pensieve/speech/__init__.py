"""Speech: what an answer holds beside words, thoughts and calls of functions; read from text, written as text.

A model calls a function by writing so, in the form that its family was trained on (``CallForm``). The history keeps
what it wrote, token by token; whoever shows an answer reads it with ``SpeechReader``, in pieces or whole, alike.

May import: nothing else of Pensieve.
"""

from pensieve.speech.calls import (
    SHOWN_MARKS,
    CallForm,
    FunctionCall,
    call_prefix,
    is_json_object,
    render_answer,
)
from pensieve.speech.ends import FirstCall, ThoughtEnd
from pensieve.speech.reader import (
    CLOSE_THOUGHT,
    OPEN_THOUGHT,
    PLAIN,
    Answer,
    AnswerPart,
    SpeechForm,
    SpeechReader,
    Thought,
    Words,
    read,
)

__all__ = [
    "CLOSE_THOUGHT",
    "OPEN_THOUGHT",
    "PLAIN",
    "SHOWN_MARKS",
    "Answer",
    "CallForm",
    "FirstCall",
    "FunctionCall",
    "SpeechForm",
    "SpeechReader",
    "AnswerPart",
    "Thought",
    "ThoughtEnd",
    "Words",
    "is_json_object",
    "call_prefix",
    "read",
    "render_answer",
]
