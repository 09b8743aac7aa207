"""Speech: parses the text of an answer into words, thoughts and function calls, and renders them back.

A model calls a function by writing so, in the form that its family was trained on (``CallForm``). The history
keeps the generated tokens as they are. Clients and servers parse an answer with ``SpeechReader``, in pieces or
whole, with the same result.

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
from pensieve.speech.grammar import (
    AnswerFormat,
    AnswerShape,
    FormatKind,
    GrammarPart,
    OfferedFunction,
    answer_grammar,
    arguments_grammar,
    format_grammar,
    grammar_text,
)
from pensieve.speech.reader import (
    CLOSE_THOUGHT,
    OPEN_THOUGHT,
    PLAIN,
    Answer,
    AnswerPart,
    FirstCall,
    SpeechForm,
    SpeechReader,
    Thought,
    ThoughtEnd,
    Words,
    read,
)

__all__ = [
    "CLOSE_THOUGHT",
    "OPEN_THOUGHT",
    "PLAIN",
    "SHOWN_MARKS",
    "Answer",
    "AnswerFormat",
    "AnswerShape",
    "CallForm",
    "FirstCall",
    "FormatKind",
    "FunctionCall",
    "GrammarPart",
    "OfferedFunction",
    "SpeechForm",
    "SpeechReader",
    "AnswerPart",
    "Thought",
    "ThoughtEnd",
    "Words",
    "answer_grammar",
    "arguments_grammar",
    "format_grammar",
    "grammar_text",
    "is_json_object",
    "call_prefix",
    "read",
    "render_answer",
]
