"""The grammar of a turn's answer, from its format, its rules for calls and the session's functions."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Final

import msgspec

from pensieve.core import Grammar, Sampling
from pensieve.errors import InvalidArgument
from pensieve.server.grammars.checker import MAX_BYTES, MAX_TOTAL_BYTES, NOT_INSTALLED, GrammarChecker
from pensieve.server.values import CallRules, NewTurn
from pensieve.speech import (
    AnswerShape,
    GrammarPart,
    OfferedFunction,
    answer_grammar,
    arguments_grammar,
    call_prefix,
    format_grammar,
    grammar_text,
)
from pensieve.tokenizer import ChatTokenizer

_STEP_ITEMS: Final = 500
"""Most parser items for one token of a grammar that a caller wrote. Schemas with many optional fields need more."""


def answer_shape(
    spec: NewTurn, tools: str, tokenizer: ChatTokenizer, *, is_prompted: bool
) -> AnswerShape | None:
    """Return the shape that the turn's answer must have; None: it may be any text.

    ``tools``: definitions that the model sees. ``is_prompted``: the answer follows a generation prompt, so it may
    think. Raises InvalidArgument for a function that the session does not have.
    """
    if spec.format is None and spec.calls.begin_with is None and spec.rules == CallRules():
        return None
    form = tokenizer.speech
    if not is_prompted:
        form = replace(form, thinks=False, begins_thinking=False)
    offered = _offered(tools, spec.rules.strict) if form.calls is not None else ()
    _check_names(spec, offered)
    allowed = spec.rules.allowed or tuple(one.name for one in offered)
    if spec.calls.begin_with:
        allowed = (spec.calls.begin_with,)
    functions = () if spec.rules.none else tuple(one for one in offered if one.name in allowed)
    is_bound = (
        spec.format is not None
        or spec.calls.begin_with is not None
        or any(one.strict for one in functions)
        or 0 < len(functions) < len(offered)
    )
    if not is_bound:
        return None
    return AnswerShape(
        form,
        functions,
        must_call=spec.calls.begin_with is not None,
        one_call=spec.calls.one,
        format=spec.format,
        template=tokenizer.template_source,
    )


def opening(shape: AnswerShape | None) -> str:
    """Return the beginning of the call with which the answer must begin; "" if it must not. A stop string in it does
    not end the answer."""
    if shape is None or not shape.must_call or shape.form.calls is None:
        return ""
    # With one function there is no choice: the beginning includes its name.
    name = shape.functions[0].name if len(shape.functions) == 1 else ""
    return call_prefix(name, shape.form.calls, shape.template)


async def with_grammar(
    values: Sampling, shape: AnswerShape, tokenizer: ChatTokenizer, checker: GrammarChecker, tenant: str
) -> Sampling:
    """Return ``values`` with the grammar of this shape, each part of which was compiled. Raises InvalidArgument."""
    path = "turn.calls" if shape.format is None else f"turn.format.{shape.format.kind}"
    if values.beam_width > 1:
        problem = f"does not go with the beam_width in force, which is {values.beam_width}"
        raise InvalidArgument.field(path, problem)
    if not checker.installed():
        raise InvalidArgument.field(path, NOT_INSTALLED)
    try:
        if shape.format is not None:
            await _check(checker, tenant, format_grammar(shape.format))
    except ValueError as error:
        raise InvalidArgument.field(path, str(error)) from error
    for one in shape.functions:
        try:
            if one.strict and (one.parameters or {}).get("type", "object") != "object":
                raise ValueError("/type: must be object")
            await _check(checker, tenant, arguments_grammar(one))
        except ValueError as error:
            where = "turn.calls.strict" if one.strict else "turn.calls"
            problem = f"the parameters of the function {one.name!r} cannot be enforced: {error}"
            raise InvalidArgument.field(where, problem) from error
    text = answer_grammar(shape, tokenizer.mark_id)
    if len(text) > MAX_TOTAL_BYTES:
        problem = f"has, with the session's functions, more than {MAX_TOTAL_BYTES} bytes of grammar"
        raise InvalidArgument.field(path, problem)
    if shape.format is not None and shape.format.costly:
        grammar = Grammar(text, step_items=_STEP_ITEMS)
    else:
        grammar = Grammar(text)
    return msgspec.structs.replace(values, grammar=grammar)


async def _check(checker: GrammarChecker, tenant: str, part: GrammarPart) -> None:
    """Raise ValueError with the problem of a grammar, if it has one."""
    text = grammar_text(part)
    if len(text) > 2 * MAX_BYTES:
        raise ValueError(f"is larger than {MAX_BYTES} bytes")
    problem = await checker.problem(tenant, text)
    if problem is not None:
        raise ValueError(problem)


def _offered(tools: str, strict: tuple[str, ...]) -> tuple[OfferedFunction, ...]:
    definitions = [one["function"] for one in json.loads(tools or "[]")]
    return tuple(
        OfferedFunction(one["name"], one.get("parameters"), one["name"] in strict) for one in definitions
    )


def _check_names(spec: NewTurn, offered: tuple[OfferedFunction, ...]) -> None:
    names = {one.name for one in offered}
    if spec.calls.begin_with is not None and not names:
        raise InvalidArgument.field("turn.calls.begin_with", "the session has no functions to call")
    begin = (spec.calls.begin_with,) if spec.calls.begin_with else ()
    given = {"begin_with": begin, "allowed": spec.rules.allowed, "strict": spec.rules.strict}
    for field, wanted in given.items():
        for name in wanted:
            if name not in names:
                raise InvalidArgument.field(f"turn.calls.{field}", f"the session has no function {name!r}")
