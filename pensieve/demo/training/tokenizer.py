"""Builds the demo model's tokenizer: byte-level BPE in which a word is spelled the same wherever it stands.

Merges are learned on words without their leading space; only whole frequent words get a variant with the space
merged in, after all other merges. An unseen name therefore has one spelling in pieces, at the beginning of a text as in
the middle, and copying it is copying those pieces. Digits stand alone.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import islice
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from pensieve.demo.training.dialogues import dialogue

PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIALS = (PAD, END, SYSTEM, USER, ASSISTANT)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
VOCAB_SIZE = 1536
_SPACED_WORDS = 320
_PIECES = r"\p{L}+|['\u2019](?:s|m|t|re|ll|ve|d)(?!\p{L})|\p{N}|[^\s\p{L}\p{N}]|\s"
_SPACE = "\u0120"  # how byte-level BPE writes a space


def _splitter(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _corpus(dialogues: int, turns: int) -> list[str]:
    return [
        text
        for seed in range(dialogues)
        for turn in islice(dialogue(random.Random(f"tokenizer {seed}")), turns)
        for text in (turn.user, turn.assistant)
    ]


def build(dialogues: int = 600, turns: int = 60) -> Tokenizer:
    """Learns the tokenizer from generated training dialogues; the same arguments give the same tokenizer."""
    corpus = _corpus(dialogues, turns)
    # First pass: merges are learned on words without their leading space, so that none of them contains one.
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = _splitter(_PIECES)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    size = VOCAB_SIZE - len(SPECIALS) - _SPACED_WORDS
    learner.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(learner.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [tuple(pair) for pair in model["merges"]]

    # Second pass: frequent whole words get a variant with the space in front. Their merges come after all others,
    # so that a word is put together first and takes its space last.
    spaced: Counter[str] = Counter()
    words = _splitter(" ?" + _PIECES)
    for text in corpus:
        spaced.update(word[1:] for word, _ in words.pre_tokenize_str(text) if word.startswith(_SPACE))
    known = set(pieces)
    ranked = sorted(spaced.items(), key=lambda row: (-row[1], row[0]))
    frequent = [word for word, _ in ranked if word in known and (len(word) > 1 or word in "Ia")]
    chosen = frequent[:_SPACED_WORDS]

    vocab = {
        token: index for index, token in enumerate([*SPECIALS, *pieces, *(_SPACE + word for word in chosen)])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges + [(_SPACE, word) for word in chosen]))
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template the way transformers expects them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
