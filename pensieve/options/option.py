"""One option of ``pensieve serve``: name, parser, help, and why the default is what it is."""

from __future__ import annotations

from dataclasses import dataclass

from pensieve.options import values


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``name`` is the flag without dashes and the TOML key."""

    name: str
    parse: values.Parser
    help: str
    why: str
    """Reason of the default, for ``--print-config``."""
    metavar: str = ""
    shown: str = ""
    """The default in ``--help``, where the value itself would not do."""
    can_negate: bool = True
    """A switch has a ``--no-`` twin."""
    unit: str = ""
    """``s``: the value is in seconds, and so is called ``…_s`` in ``ServeOptions``."""
    attribute: str = ""
    """Its name in ``ServeOptions``, where that is longer."""
    words: tuple[str, ...] = ()
    """Values that are taken as they are where a file is asked for."""

    @property
    def field(self) -> str:
        """Attribute of ``ServeOptions``."""
        return self.attribute or self.name.replace("-", "_") + (f"_{self.unit}" if self.unit else "")

    @property
    def is_switch(self) -> bool:
        return self.parse is values.boolean

    @property
    def is_file(self) -> bool:
        return self.parse in (values.existing_file, values.file_to_write) or bool(self.words)
