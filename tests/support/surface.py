"""The public surface of the product as a list of lines, and what a change removed from it.

python tests/support/surface.py                     # every name, a line each
python tests/support/surface.py --before ../other   # removals and additions against another checkout with a .venv

Kinds: RPCs and fields of messages, options of each command, reasons and status codes of errors, metrics, HTTP routes,
names and signatures of the SDK. Every removal needs a reason in ``surface_removals.json`` beside this file; one without
makes the exit status 1.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

HERE = Path(__file__)
REASONS = HERE.with_name("surface_removals.json")
REASON = re.compile(r"[A-Z][A-Z_]{3,}")
METRIC = re.compile(r"pensieve_[a-z0-9_]+")
ROUTE = re.compile(r"/(v1/|healthz|readyz|livez|metrics|state)[^\s]*")


def _protocol() -> Iterator[str]:
    for module in ("pensieve_pb2", "admin_pb2"):
        try:
            descriptor = importlib.import_module(f"pensieve.v1.{module}").DESCRIPTOR
        except ModuleNotFoundError:
            continue
        for service in descriptor.services_by_name.values():
            for method in service.methods:
                yield f"rpc {service.full_name}.{method.name}({method.input_type.name}) {method.output_type.name}"
        for message in descriptor.message_types_by_name.values():
            yield from _fields(message)
        for enum in descriptor.enum_types_by_name.values():
            for value in enum.values:
                yield f"enum {enum.full_name}.{value.name} = {value.number}"


def _fields(message: object) -> Iterator[str]:
    for field in message.fields:  # type: ignore[attr-defined]
        yield f"field {message.full_name}.{field.name} = {field.number}"  # type: ignore[attr-defined]
    for inner in message.nested_types:  # type: ignore[attr-defined]
        yield from _fields(inner)


def _options(command: click.Command, name: str) -> Iterator[str]:
    yield f"command {name}"
    for parameter in command.params:
        for option in [*parameter.opts, *parameter.secondary_opts]:
            yield f"option {name} {option}"
    if isinstance(command, click.Group):
        context = click.Context(command)
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            if found is not None:
                yield from _options(found, f"{name} {inner}")


def _sdk() -> Iterator[str]:
    client = importlib.import_module("pensieve.client")
    for name in client.__all__:
        value = getattr(client, name)
        yield f"sdk {name}"
        if not inspect.isclass(value):
            continue
        for member, found in inspect.getmembers(value):
            if (member.startswith("_") and member != "__init__") or not value.__module__.startswith(
                "pensieve"
            ):
                continue
            if inspect.isfunction(found):
                yield f"sdk {name}.{member}({_parameters(found)})"
            elif member != "__init__":
                yield f"sdk {name}.{member}"
        for field in getattr(value, "__annotations__", {}):
            if not field.startswith("_"):
                yield f"sdk {name}.{field}"


def _parameters(function: Callable[..., object]) -> str:
    """Names in order, then the keyword-only ones by name: their order says nothing to a caller."""
    given = inspect.signature(function).parameters.values()
    named = sorted(one.name for one in given if one.kind is one.KEYWORD_ONLY)
    return ", ".join(
        [one.name for one in given if one.kind is not one.KEYWORD_ONLY] + ["*"] * bool(named) + named
    )


def _literals(root: Path) -> Iterator[str]:
    """Metrics, routes and reasons, which are strings wherever they stand in the sources."""
    documented = set(REASON.findall((root / "docs/errors.md").read_text()))
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", "pensieve", "store"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    for path in listed:
        if not path.endswith(".py") or "_pb2" in path or not (root / path).is_file():
            continue
        for node in ast.walk(ast.parse((root / path).read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if METRIC.fullmatch(node.value):
                    yield f"metric {node.value}"
                elif ROUTE.fullmatch(node.value):
                    yield f"route {node.value}"
                elif node.value in documented:
                    yield f"reason {node.value}"


def surface(root: Path) -> list[str]:
    """Every public name of the package that this interpreter imports; ``root`` is its checkout."""
    cli = importlib.import_module("pensieve.cli.main").cli
    return sorted({*_protocol(), *_options(cli, "pensieve"), *_sdk(), *_literals(root)})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--root", type=Path, default=HERE.parents[2], help=argparse.SUPPRESS)
    parser.add_argument("--before", type=Path, help="another checkout, whose .venv imports it")
    options = parser.parse_args()
    if options.before is None:
        print("\n".join(surface(options.root)))
        return
    command = [options.before / ".venv/bin/python", "-P", HERE, "--root", options.before]
    listed = subprocess.run(command, cwd=options.before, capture_output=True, text=True, check=True)
    before, now = set(listed.stdout.splitlines()), set(surface(options.root))
    reasons: dict[str, str] = json.loads(REASONS.read_text()) if REASONS.exists() else {}
    unexplained = 0
    for name in sorted(before - now):
        unexplained += name not in reasons
        print(f"- {name}: {reasons.get(name, 'NO REASON GIVEN')}")
    for name in sorted(now - before):
        print(f"+ {name}")
    print(
        f"{len(before)} names before, {len(now)} now, {len(before - now)} removed, {unexplained} without a reason"
    )
    sys.exit(unexplained > 0)


if __name__ == "__main__":
    main()
