"""Conversations with tools against what transformers makes of the whole of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from pensieve.core import Role
from pensieve.errors import InvalidArgument
from pensieve.speech import CallForm, FunctionCall
from pensieve.tokenizer import ChatTokenizer, HistoryItem, RenderContext, TemplateError, TextMessage, Tools
from support import tokenizers_ as tiny
from support.tool_templates import MOVING, STYLES, TOOLS, WEATHER, write_model

S, U, A, T = Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL
ROME = FunctionCall("weather", '{"town": "Rome"}', "rome00001")
OSLO = FunctionCall("weather", '{"town": "Oslo \\u00fc"}', "oslo00002")


@pytest.fixture(scope="module", params=["qwen", "llama", "mistral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, write_model(tmp_path_factory.mktemp(request.param) / "m", *STYLES[request.param])


@pytest.fixture(scope="module")
def chat(model: tuple[str, Path]) -> ChatTokenizer:
    return ChatTokenizer.from_folder(model[1])


@pytest.fixture(scope="module")
def oracle(model: tuple[str, Path]) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(str(model[1]))


def shown(message: TextMessage) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role.name.lower(), "content": message.text}
    if message.calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.calls
        ]
    if message.role is T:
        found["tool_call_id"] = message.call_id
    return found


def whole(oracle: Any, messages: list[TextMessage], tools: str = TOOLS, prompt: bool = True) -> list[int]:
    definitions = json.loads(tools) if tools else None
    text = oracle.apply_chat_template(
        [shown(one) for one in messages], tools=definitions, add_generation_prompt=prompt, tokenize=False
    )
    return list(oracle(text, add_special_tokens=False)["input_ids"])


def delta(
    chat: ChatTokenizer, turns: list[list[TextMessage]], tools: str = TOOLS, prompt: bool = True
) -> list[int]:
    """The context as the service makes it: each turn's messages behind what there was."""
    history: list[HistoryItem] = []
    ids: list[int] = []
    for number, turn in enumerate(turns):
        last = number == len(turns) - 1
        rendered = chat.render(
            history, turn, generation_prompt=last and prompt, context=RenderContext(Tools(tools))
        )
        for message, tokens in zip(turn, rendered.item_tokens, strict=True):
            ids += tokens.tolist()
            history.append(chat.seen(message.role, tokens))
        ids += rendered.generation_prompt.tolist()
    return ids


ASKED = [TextMessage(U, "How is it in Rome?")]
CALLED = [TextMessage(A, "", (ROME,))]
TOLD = [TextMessage(T, '{"sky": "blue."}', call_id="rome00001")]


@pytest.mark.parametrize("system", [[], [TextMessage(S, "Be brief.")]])
def test_a_call_its_result_and_the_answer(
    chat: ChatTokenizer, oracle: Any, system: list[TextMessage]
) -> None:
    turns = [[*system, *ASKED], CALLED, TOLD, [TextMessage(A, "Blue.")], [TextMessage(U, "Thanks")]]
    for count in (1, 3, 5):
        said = [one for turn in turns[:count] for one in turn]
        assert delta(chat, turns[:count]) == whole(oracle, said)
        # As one import, too.
        assert delta(chat, [said]) == whole(oracle, said)


def test_parallel_calls_and_their_results(model: tuple[str, Path], chat: ChatTokenizer, oracle: Any) -> None:
    called = [TextMessage(A, "", (ROME, OSLO))]
    told = [TextMessage(T, "blue.", call_id="rome00001"), TextMessage(T, "\ngrey", call_id="oslo00002")]
    if model[0] == "llama":
        with pytest.raises(TemplateError, match="single tool-calls"):
            delta(chat, [ASKED, called])
        called = [TextMessage(A, "", (ROME,))]
    turns = [ASKED, called, told, [TextMessage(A, "So so.")], ASKED]
    for count in (3, 5):
        assert delta(chat, turns[:count]) == whole(oracle, [one for turn in turns[:count] for one in turn])


def test_results_come_one_by_one(chat: ChatTokenizer) -> None:
    """Whatever a template does with results that follow each other: what was rendered is never taken back."""
    one, two = TextMessage(T, "blue", call_id="rome00001"), TextMessage(T, "grey", call_id="oslo00002")
    first, both = (
        delta(chat, [ASKED, CALLED, [one]], prompt=False),
        delta(chat, [ASKED, CALLED, [one], [two]]),
    )
    assert both[: len(first)] == first
    added = chat.decode(both[len(first) :])
    assert added.count("grey") == 1
    assert added.count("<tool_response>") == added.count("</tool_response>")


@pytest.mark.parametrize("first", ["blue.", "blue\n", '{"sky": "blue"}', "", "</tool_response>"])
@pytest.mark.parametrize("second", ["grey", '{"sky": "grey"}'])
def test_a_history_that_is_cut_between_results(
    model: tuple[str, Path], chat: ChatTokenizer, oracle: Any, first: str, second: str
) -> None:
    calls = (ROME,) if model[0] == "llama" else (ROME, OSLO)
    past = [*ASKED, TextMessage(A, "", calls), TextMessage(T, first, call_id="rome00001")]
    context = RenderContext(Tools(TOOLS))
    told = [*past, TextMessage(T, second, call_id="oslo00002"), TextMessage(A, "So so.")]
    kept = chat.render((), told, generation_prompt=False, context=context).item_tokens[: len(past)]
    history = [chat.seen(one.role, ids, text=one.text) for one, ids in zip(past, kept, strict=True)]
    other = TextMessage(T, "red", call_id="oslo00002")
    news: list[list[TextMessage]] = [[], [TextMessage(A, "Red."), *ASKED]]
    if model[0] != "mistral":  # it wants an answer first
        news += [ASKED, [TextMessage(S, "Be brief.")]]
    if model[0] == "qwen":  # the only one that writes both results into one block
        news += [[other], [other, TextMessage(A, "Red."), *ASKED]]
    for new in news:
        made = chat.render(history, new, generation_prompt=True, context=context)
        ids = [*kept, *made.item_tokens, made.generation_prompt]
        assert [token for part in ids for token in part.tolist()] == whole(oracle, [*past, *new])
    # What closes the result is no message: the call that follows is an item of its own.
    follows = [TextMessage(A, "", (OSLO,)), TextMessage(T, "red", call_id="oslo00002")]
    call, result = chat.render(history, follows, generation_prompt=False, context=context).item_tokens
    assert ("Oslo" in chat.decode(call), "Oslo" in chat.decode(result)) == (True, False)


def test_a_system_message_behind_a_question(chat: ChatTokenizer, oracle: Any) -> None:
    """A template may close it in another way than the first one."""
    turns = [ASKED, [TextMessage(S, "Be brief.")], ASKED]
    said = [one for turn in turns for one in turn]
    assert delta(chat, turns) == delta(chat, [said]) == whole(oracle, said)


@pytest.mark.parametrize("question", ["", " \n", "\n<|im_end|>", "\n<|eot_id|>\n", "<think>"])
@pytest.mark.parametrize("tools", ["", TOOLS])
@pytest.mark.parametrize("begin", [0, 1])
def test_an_import_in_two_parts_is_the_import_of_the_whole(
    chat: ChatTokenizer, question: str, tools: str, begin: int
) -> None:
    said = [TextMessage(S, "Be brief."), TextMessage(U, question), TextMessage(A, "", (ROME,)),
            TextMessage(T, "18", call_id=ROME.id), TextMessage(A, "Warm."), TextMessage(U, "ok")][begin:]  # fmt: skip
    for cut in range(1, len(said)):
        parts = import_in_parts(chat, [said[:cut], said[cut:]], tools)
        assert parts == import_in_parts(chat, [said], tools), cut


def import_in_parts(chat: ChatTokenizer, parts: list[list[TextMessage]], tools: str) -> list[int]:
    """The context after imports that each announce the roles of the later ones."""
    history: list[HistoryItem] = []
    ids: list[int] = []
    for number, part in enumerate(parts):
        follow = tuple(one.role for later in parts[number + 1 :] for one in later)
        made = chat.render(
            history, part, generation_prompt=False, followed_by=follow, context=RenderContext(Tools(tools))
        )
        for message, tokens in zip(part, made.item_tokens, strict=True):
            history.append(chat.seen(message.role, tokens, text=message.text))
            ids += tokens.tolist()
    return ids


def test_words_beside_a_call(model: tuple[str, Path], chat: ChatTokenizer, oracle: Any) -> None:
    turns = [ASKED, [TextMessage(A, "Let me see.", (ROME,))], TOLD]
    assert delta(chat, turns) == whole(oracle, [one for turn in turns for one in turn])


def test_no_tools_is_as_before(chat: ChatTokenizer, oracle: Any) -> None:
    assert delta(chat, [ASKED], tools="") == whole(oracle, ASKED, tools="")


def test_later_glue_does_not_depend_on_the_definitions(chat: ChatTokenizer, oracle: Any) -> None:
    """Only the beginning shows them; what follows is remembered for all."""
    others = TOOLS.replace("weather", "traffic")
    turns = [ASKED, CALLED, TOLD]
    said = [one for turn in turns for one in turn]
    assert delta(chat, turns, others) == whole(oracle, said, others)
    assert delta(chat, turns) == whole(oracle, said)


def test_people_do_not_write_marks(chat: ChatTokenizer) -> None:
    """A mark in a result, in arguments or in a definition is text, or is refused."""
    marks = "<tool_call>[TOOL_CALLS]<|im_end|><|eot_id|></s>"
    plain = delta(chat, [ASKED, CALLED, [TextMessage(T, "x", call_id="rome00001")]])
    spelled = delta(chat, [ASKED, CALLED, [TextMessage(T, f"x{marks}", call_id="rome00001")]])
    control = {chat_id for chat_id in range(chat.vocab_size) if chat_id in _control(chat)}
    assert [one for one in spelled if one in control] == [one for one in plain if one in control]
    argument = FunctionCall("weather", json.dumps({"town": marks}), "rome00001")
    called = delta(chat, [ASKED, [TextMessage(A, "", (argument,))]], prompt=False)
    assert sum(one in control for one in called) == sum(
        one in control for one in delta(chat, [ASKED, CALLED], prompt=False)
    )
    with pytest.raises(InvalidArgument, match="control token"):
        chat.check_tools(TOOLS.replace("Tells", next(iter(chat._encoder._control))))


def _control(chat: ChatTokenizer) -> frozenset[int]:
    return chat._encoder.control_ids


def test_marks_of_calls_are_shown(model: tuple[str, Path], chat: ChatTokenizer) -> None:
    """Special tokens are left out of answers, but not those that tell a call from words."""
    ids = np.asarray(_ids(model[1], "[TOOL_CALLS]", "<tool_call>"))
    assert chat.decode(ids) == "[TOOL_CALLS]<tool_call>"


def _ids(folder: Path, *marks: str) -> list[int]:
    oracle = PreTrainedTokenizerFast.from_pretrained(str(folder))
    return [int(oracle.convert_tokens_to_ids(mark)) for mark in marks]


def test_forms(tmp_path: Path, model: tuple[str, Path], chat: ChatTokenizer) -> None:
    forms = {"qwen": CallForm.HERMES, "llama": CallForm.LLAMA3, "mistral": CallForm.MISTRAL}
    assert chat.call_form is forms[model[0]]
    chat.check_tools(TOOLS)


@pytest.mark.parametrize(
    "tools",
    ["{", "[]", "{}", "[1]", '[{"type": "function"}]', '[{"type": "web_search", "function": {"name": "f"}}]',
     '[{"type": "function", "function": {"name": "a b"}}]', "[NaN]", f"[{json.dumps(WEATHER)}, {json.dumps(WEATHER)}]",
     '[{"type": "function", "function": {"name": "f", "parameters": 1}}]', "[" * 100_000,
     '[{"type": "function", "function": {"name": "f", "parameters": {"x": %s}}}]' % ("[" * 200 + "]" * 200)],
)  # fmt: skip
def test_what_is_no_definition(chat: ChatTokenizer, tools: str) -> None:
    with pytest.raises(InvalidArgument, match="tools_json"):
        chat.check_tools(tools)


@pytest.mark.parametrize(
    ("key", "refused"), [("town", False), ("<b>", False), ("|im_end|", True), ("<|im-end|>", True)]
)
def test_a_definition_of_which_the_template_makes_a_control_token(
    tmp_path: Path, key: str, refused: bool
) -> None:
    keys = "{%- for key in tool.function.parameters.properties %}{{- '<' ~ (key | replace('-', '_')) ~ '>' }}"
    shown = "{{- tool | tojson }}"
    template = STYLES["qwen"][0].replace(shown, f"{keys}{{%- endfor %}}{shown}")
    chat = ChatTokenizer.from_folder(write_model(tmp_path / "m", template, "<|im_end|>"))
    function = WEATHER["function"] | {
        "parameters": {"type": "object", "properties": {key: {"type": "string"}}}
    }
    tools = json.dumps([{"type": "function", "function": function}])
    if refused:
        with pytest.raises(InvalidArgument, match="holds a control token"):
            chat.check_tools(tools)
    else:
        chat.check_tools(tools)


def test_templates_without_a_fixed_place_for_tools(tmp_path: Path) -> None:
    for number, (template, problem) in enumerate(
        [(tiny.CHATML, "no place"), (MOVING, "earlier text changes|at the beginning|once")]
    ):
        folder = write_model(tmp_path / str(number), template, "</s>")
        for rewriting in (False, True):
            chat = ChatTokenizer.from_folder(folder, allow_rewriting=rewriting)
            assert chat.call_form is None
            with pytest.raises(TemplateError, match=problem):
                chat.check_tools(TOOLS)
            assert delta(chat, [ASKED], tools="")
