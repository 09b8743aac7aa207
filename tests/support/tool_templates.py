"""Chat templates with tools, in the styles of the families that are served, and tokenizers that know their marks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from support.tokenizers_ import byte_level, write_folder

QWEN25 = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'You help.' }}{%- endif %}
{{- "\\n\\n# Tools\\n<tools>" }}
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{{- "\\n</tools>\\nCall them so:\\n<tool_call>\\n{...}\\n</tool_call><|im_end|>\\n" }}
{%- else %}
{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- for message in messages %}
{%- if message.role == "system" and loop.first %}
{%- elif message.role != "tool" and not message.tool_calls %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == "assistant" %}
{{- '<|im_start|>' + message.role }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == "tool" %}
{%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
{%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Definitions in the system message; results that follow each other share a message."""

THINKING = QWEN25.replace(
    "{{- '<|im_start|>assistant\\n' }}{%- endif %}\n",
    "{{- '<|im_start|>assistant\\n' }}{%- endif %}{#- <think> -#}\n",
)
"""A model that thinks in tags, as it likes."""

LAST_THINKS = """\
{%- set ns = namespace(query=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.query = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set words = m.content.split('</think>')[-1].lstrip('\\n') %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in m.content else '' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.query and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
{{- words + '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Shows the thoughts since the last question only, and an empty one in a last answer without."""

LLAMA31 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}
{%- set messages = messages[1:] %}{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- system }}{{- "<|eot_id|>" }}
{%- if tools is not none %}
{%- if messages | length != 0 %}
{%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{{- raise_exception("Cannot put tools in the first user message when there's none!") }}{%- endif %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\nRespond with {"name": ..., "parameters": ...}.\\n\\n' }}
{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
{%- if not (message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls | length == 1 %}{{- raise_exception("only single tool-calls at once!") }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + call.name + '", ' }}{{- '"parameters": ' }}{{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
{%- else %}
{{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
{%- else %}{{- message.content }}{%- endif %}{{- "<|eot_id|>" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
"""Definitions in the first user's message; results as JSON strings; no parallel calls."""

MISTRAL = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{{- '[SYSTEM_PROMPT]' + messages[0]['content'] + '[/SYSTEM_PROMPT]' }}
{%- set messages = messages[1:] %}{%- endif %}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for m in messages %}{%- if not (m.role == 'tool' or m.tool_calls) %}
{%- if (m.role == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{- raise_exception('ids of calls have length 9') }}{%- endif %}
{{- '[TOOL_RESULTS]{"content": ' + m.content | string + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}
{{- '[TOOL_CALLS][' }}
{%- for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{- raise_exception('ids of calls have length 9') }}{%- endif %}
{{- (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' }}{{- '' if loop.last else ', ' }}
{%- endfor %}
{{- ']' + eos_token }}
{%- else %}{{- ' ' + m.content + eos_token }}{%- endif %}
{%- endfor %}
"""
"""Definitions behind the system prompt; strict about what alternates, and about ids."""

MOVING = MISTRAL.replace("{%- if tools %}", "{%- if false %}").replace(
    "{{- '[INST]'",
    "{{- ('[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]') if tools and loop.last else '' }}{{- '[INST]'",
)
"""As Mistral's first templates: definitions before the last user's message, wherever that is."""

MARKS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[INST]",
         "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "</think>")  # fmt: skip
STYLES = {
    "qwen": (QWEN25, "<|im_end|>"), "llama": (LLAMA31, "<|eot_id|>"), "mistral": (MISTRAL, "</s>"),
    "thinking": (THINKING, "<|im_end|>"), "last thinks": (LAST_THINKS, "<|im_end|>"),
}  # fmt: skip
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a town; \u00fcberall.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
TOOLS = json.dumps([WEATHER], ensure_ascii=False)


def tokenizer_json() -> str:
    """The byte-level tokenizer, with the marks as tokens: some are special, as in the models."""
    spec = Tokenizer.from_str(byte_level())
    spec.add_tokens([AddedToken(mark, special=mark[0] == "[", normalized=False) for mark in MARKS])
    return spec.to_str()


def write_model(folder: Path, template: str, eos: str, **config: Any) -> Path:
    """A model folder with such a tokenizer."""
    return write_folder(folder, tokenizer_json(), template, eos=eos, **config)
