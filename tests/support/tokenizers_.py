"""Tiny tokenizers of the kinds that models ship with, written as model folders, and chat templates in their styles."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SPECIAL = (
    "<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>",
)  # fmt: skip
SENTENCES = (
    "hello world, the quick brown fox jumps over the lazy dog",
    "user assistant system tool INST SYS User: Assistant: what is my name? My name is Ada.",
    "in the beginning was the word and the word was with us",
)

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and system is not false %}"
    "{% set text = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m['content'] %}"
    "{% else %}{% set text = m['content'] %}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + text.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + text.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
    " + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% set c = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in c and loop.index0 < ns.last %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DATED = "{{ 'Today is ' + strftime_now('%d %B %Y') + '\n' }}" + CHATML
SHORTENS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' "
    "+ (m.content if loop.revindex < 3 else m.content | upper) + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Rewrites what is older than two messages."""
SHORTENS_LATE = SHORTENS.replace("loop.revindex < 3", "loop.revindex < 21")
KEEPS_LAST = CHATML.replace("in messages %}", "in messages[-20:] %}")
LATE_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + ' ' %}"
    "{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{{ bos_token }}{% for m in rest %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + (system if loop.last else '') + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MODES = (
    "{% set ns = namespace(mode='/think') %}{% for m in messages %}"
    "{% if m.role in ('system', 'user') and '/no_think' in m.content %}{% set ns.mode = '/no_think' %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% set c = m.content.replace('/no_think', '') %}"
    "{% if loop.first %}{{ '<|im_start|>system\nMode: ' + ns.mode + '\n' }}"
    "{{ (c.rstrip() if m.role == 'system' else 'You help.') + '<|im_end|>\n' }}{% endif %}"
    "{% if m.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' + ('' if ns.mode == '/think' else '<think>\n\n</think>\n') + c + '<|im_end|>\n' }}"
    "{% elif m.role != 'system' %}{{ '<|im_start|>' + m.role + '\n' + c + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' + ('' if ns.mode == '/think' else '<think>\n\n</think>\n') }}{% endif %}"
)
"""Thinks or not by a word of a message, which it takes out, as SmolLM3 does."""
CLOSES_LATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'Q:' + m.content + '\n' }}"
    "{% else %}{{ 'A:' + m.content + ('' if loop.last else eos_token) }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
)


@functools.cache
def byte_level() -> str:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have it; JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer.to_str()


@functools.cache
def metaspace(legacy: bool) -> str:
    """BPE with byte fallback as Llama 2 (``legacy``: a prepended space per segment) and Mistral have it; JSON."""
    trained = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=len(SPECIAL) + 256 + 150, special_tokens=[*SPECIAL, *bytes_], show_progress=False
    )
    trained.train_from_iterator(SENTENCES * 4, trainer)
    spec = json.loads(trained.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in SPECIAL]
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        tokenizer.pre_tokenizer = None  # type: ignore[assignment]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer.to_str()


@functools.cache
def unigram() -> str:
    """Unigram whose vocabulary holds ``</s>`` as an ordinary piece too; JSON."""
    chars = sorted(set("".join(SENTENCES)) | set("</s>|_\u2581"))
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((char, -5.0) for char in chars if char != " ")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return tokenizer.to_str()


def with_bos(tokenizer: str, bos: str = "<s>") -> str:
    """The same with a post-processor that puts ``bos`` before each text; JSON."""
    made = Tokenizer.from_str(tokenizer)
    made.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, made.token_to_id(bos))]
    )
    return made.to_str()


def write_folder(
    folder: Path, tokenizer: str, template: str | None = None, *, bos: str | None = "<s>", eos: str = "</s>",
    **config: object,
) -> Path:  # fmt: skip
    """A model folder with a tokenizer and, in ``config.json``, what is given beside."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer)
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos
    }  # fmt: skip
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder
