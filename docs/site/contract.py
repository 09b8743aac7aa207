"""The page on calls and messages, from the ``.proto`` and its comments."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    SourceCodeInfo,
)
from staging import ROOT

Path_ = tuple[int, ...]
_SCALARS = {number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()}


def page() -> str:
    """Markdown: both services, then every message and enum in the order of the file."""
    file = _read()
    comments = {tuple(at.path): at for at in file.source_code_info.location}
    return "\n".join(_Page(file, comments).lines()) + "\n"


def _read() -> FileDescriptorProto:
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder, "contract.binpb")
        buf = Path(sys.executable).with_name("buf")
        subprocess.run([buf, "build", ".", "-o", image], cwd=ROOT / "proto", check=True, timeout=60)
        files = FileDescriptorSet.FromString(image.read_bytes()).file
    return next(file for file in files if file.name == "pensieve/v1/pensieve.proto")


class _Page:
    def __init__(self, file: FileDescriptorProto, comments: dict[Path_, SourceCodeInfo.Location]) -> None:
        self._file, self._comments = file, comments

    def lines(self) -> Iterator[str]:
        yield from (
            "# Calls",
            "",
            "The wire contract, `proto/pensieve/v1/pensieve.proto`. What a call can end with: [errors](../errors.md).",
        )
        for at, service in enumerate(self._file.service):
            yield from ("", f"## {service.name}", "", self._said((6, at)), "", "| call | |", "|---|---|")
            for number, call in enumerate(service.method):
                answer = ("stream of " if call.server_streaming else "") + self._link(call.output_type)
                said = self._said((6, at, 2, number))
                yield f"| **{call.name}**<br>{self._link(call.input_type)}<br>→ {answer} | {said} |"
        for at, message in enumerate(self._file.message_type):
            yield from self._message(message, (4, at), "")
        for at, enum in enumerate(self._file.enum_type):
            yield from self._enum(enum, (5, at), "")

    def _message(self, message: DescriptorProto, path: Path_, owner: str) -> Iterator[str]:
        name = owner + message.name
        yield from ("", f"{'###' if owner else '##'} {name}", "", self._said(path))
        maps = {entry.name: entry for entry in message.nested_type if entry.options.map_entry}
        if message.field:
            yield from ("", "| field | type | |", "|---|---|---|")
        for at, field in enumerate(message.field):
            group = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
            one_of = f"one of *{group}*. " if group and not field.proto3_optional else ""
            kind = self._type(field, maps)
            yield f"| `{field.name}` = {field.number} | {kind} | {one_of}{self._said((*path, 2, at))} |"
        for at, enum in enumerate(message.enum_type):
            yield from self._enum(enum, (*path, 4, at), f"{name}.")
        for at, inner in enumerate(message.nested_type):
            if inner.name not in maps:
                yield from self._message(inner, (*path, 3, at), f"{name}.")

    def _enum(self, enum: EnumDescriptorProto, path: Path_, owner: str) -> Iterator[str]:
        yield from ("", f"{'###' if owner else '##'} {owner}{enum.name}", "", self._said(path), "")
        yield from ("| value | |", "|---|---|")
        for at, value in enumerate(enum.value):
            yield f"| `{value.name}` = {value.number} | {self._said((*path, 2, at))} |"

    def _type(self, field: FieldDescriptorProto, maps: dict[str, DescriptorProto]) -> str:
        entry = maps.get(field.type_name.rsplit(".", 1)[-1])
        if entry is not None:
            return f"map of {self._type(entry.field[0], {})} to {self._type(entry.field[1], {})}"
        kind = self._link(field.type_name) if field.type_name else _SCALARS[field.type]
        repeated = field.label == FieldDescriptorProto.LABEL_REPEATED
        return f"repeated {kind}" if repeated else f"optional {kind}" if field.proto3_optional else kind

    def _link(self, full_name: str) -> str:
        name = full_name.removeprefix(f".{self._file.package}.")
        if name.startswith("."):
            return name.removeprefix(".google.protobuf.")
        return f"[{name}](#{name.lower().replace('.', '')})"

    def _said(self, path: Sequence[int]) -> str:
        at = self._comments.get(tuple(path))
        text = " ".join(f"{at.leading_comments} {at.trailing_comments}".split()) if at else ""
        return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
