"""What a shell may complete behind an option: words, files, folders. Looks at nothing but what was typed."""

from __future__ import annotations

from collections.abc import Callable

from click import Context, Parameter
from click.shell_completion import CompletionItem

from pensieve.options.option import Option
from pensieve.options.values import OneOf

Completer = Callable[[Context, Parameter, str], list[CompletionItem]]


def offering(*words: str, paths: str = "") -> Completer:
    """These words, and paths of a kind: ``file`` or ``dir``."""

    def complete(ctx: Context, param: Parameter, incomplete: str) -> list[CompletionItem]:
        found = [CompletionItem(word) for word in words if word.startswith(incomplete)]
        return [*found, CompletionItem(incomplete, type=paths)] if paths else found

    return complete


models = offering("demo", "smollm2", paths="file")
"""For options that name a model. Hub ids are not known here."""


def of_option(option: Option) -> Completer:
    """For an option of ``pensieve serve``."""
    if option.name == "model":
        return models
    if isinstance(option.parse, OneOf):
        return offering(*option.parse.words)
    return offering(*option.words, paths="file" if option.is_file else "")
