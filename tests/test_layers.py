"""Imports point one way, as each package's docstring says, and the parts that promise to need no torch need none."""

from __future__ import annotations

import ast
import graphlib
import importlib.metadata
import itertools
import re
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.sources import Import, imports, module_name, python_files, tree

SOURCES = python_files("pensieve", "kernels", "store")
MODULES = {module_name(path): path for path in SOURCES}
PACKAGES = {name for name, path in MODULES.items() if path.name == "__init__.py"} | {"pensieve.kernels"}
LEAVES: dict[str, set[str]] = {
    "__main__": {"cli"},
    "config": set(),
    "core": set(),
    "debug": set(),
    "errors": set(),
    "event_names": set(),
    "extras": set(),
    "feed": set(),
    "frames": set(),
    "gguf": set(),
    "grpc_thread": set(),
    "hosts": set(),
    "kernels": set(),
    "lifeline": set(),
    "logs": {"event_names"},
    "machine": set(),
    "renewed_files": set(),
    "rpc_status": {"errors"},
    "spawn": {"debug", "extras"},
    "tracing": set(),
}
"""What the modules beside the packages may import, and ``kernels``, which has no ``__init__`` to say it in."""

NO_TORCH = (
    "pensieve.cli", "pensieve.client", "pensieve.config", "pensieve.core", "pensieve.engine.beams",
    "pensieve.engine.cache", "pensieve.engine.cost", "pensieve.engine.cost_profiles", "pensieve.engine.elastic",
    "pensieve.engine.grammar", "pensieve.engine.messages", "pensieve.engine.plan", "pensieve.engine.process",
    "pensieve.engine.scheduling", "pensieve.errors", "pensieve.frames", "pensieve.machine", "pensieve.options",
    "pensieve.replay", "pensieve.server", "pensieve.simulate", "pensieve.store",
)  # fmt: skip
"""Importable where torch and triton do not exist; packages with all their modules."""


def target(found: Import) -> str:
    """The module that an import names: the submodule when it imports one, else the module the name is from."""
    longer = f"{found.module}.{found.name}"
    return longer if longer in MODULES else found.module


def package(module: str) -> str:
    """The innermost package that a module lies in; a package lies in itself."""
    return module if module in PACKAGES else module.rpartition(".")[0]


def room(module: str) -> str:
    """A package without packages inside is a room; where there are some, each module beside them is one of its own."""
    inside = package(module)
    return module if any(other.startswith(f"{inside}.") for other in PACKAGES) else inside


def within(name: str, parent: str) -> bool:
    return name == parent or name.startswith(f"{parent}.")


def ours(path: Path) -> Iterator[Import]:
    """Imports of modules of this package. Lazy ones count: they hide circles, not dependencies."""
    return (found for found in imports(path) if within(found.module, "pensieve"))


def may_import(name: str) -> set[str]:
    """What the docstring of a package allows it, in full: ``May import: core, engine.plan.``"""
    short = name.removeprefix("pensieve.")
    if short in LEAVES:
        allowed = LEAVES[short]
    else:
        text = " ".join((ast.get_docstring(tree(MODULES[name])) or "").split())
        line = re.search(r"May import: ([^;]*?)\.(?= |$)", text)
        assert line is not None, f"the docstring of {name} must say what it may import"
        words = line[1].split(", ")
        allowed = set() if words == ["nothing else of Pensieve"] else set(words)
    return {"pensieve" if word == "pensieve" else f"pensieve.{word}" for word in allowed}


def owners(module: str) -> Iterator[str]:
    """The packages around a module, or the module itself where it lies beside the packages."""
    short = module.removeprefix("pensieve.")
    if short in LEAVES:
        yield module
        return
    around = package(module)
    while around != "pensieve":
        yield around
        around = around.rpartition(".")[0]


def test_every_package_imports_what_it_says() -> None:
    wrong, used = [], defaultdict(set)
    for name, path in MODULES.items():
        for found in ours(path):
            to = target(found)
            for owner in owners(name):
                if within(to, owner):
                    break
                matching = {
                    entry
                    for entry in may_import(owner)
                    if to == entry or (entry != "pensieve" and within(to, entry))
                }
                used[owner] |= matching
                if not matching:
                    wrong.append(f"{path}:{found.line}: {owner} must not import {to}")
    assert wrong == []
    unused = {name: left for name in {*PACKAGES, *MODULES} for left in [_declared(name) - used[name]] if left}
    assert unused == {}, "a docstring allows what nobody imports"


def _declared(name: str) -> set[str]:
    short = name.removeprefix("pensieve.")
    said = name in PACKAGES - {"pensieve", "pensieve.v1"} or short in LEAVES
    return may_import(name) if said else set()


def test_packages_have_a_purpose() -> None:
    for name in PACKAGES - {"pensieve.kernels", "pensieve.v1"}:
        assert ast.get_docstring(tree(MODULES[name])), f"{name} does not say what it is for"


def test_no_circle_among_rooms() -> None:
    edges: dict[str, dict[str, str]] = defaultdict(dict)
    for name, path in MODULES.items():
        for found in ours(path):
            if room(target(found)) != room(name) and target(found) != "pensieve":
                edges[room(name)].setdefault(room(target(found)), f"{path}:{found.line}")
    _check_one_way(edges)


def test_no_circle_among_modules() -> None:
    edges = {
        name: {
            target(found): f"{path}:{found.line}"
            for found in ours(path)
            if target(found) in MODULES and target(found) != name
        }
        for name, path in MODULES.items()
    }
    _check_one_way(edges)


def test_no_circle_among_programs() -> None:
    """``bench/`` runs as scripts with that folder on the path."""
    programs = {".".join(path.with_suffix("").parts[1:]): path for path in python_files("bench")}
    edges = {}
    for name, path in programs.items():
        found = {f"{one.module}.{one.name}": one for one in imports(path)} | {
            one.module: one for one in imports(path)
        }
        edges[name] = {to: f"{path}:{one.line}" for to, one in found.items() if to in programs}
    assert any(edges.values())
    _check_one_way(edges)


def _check_one_way(edges: dict[str, dict[str, str]]) -> None:
    try:
        graphlib.TopologicalSorter({name: set(to) for name, to in edges.items()}).prepare()
    except graphlib.CycleError as error:
        circle = error.args[1]
        places = [edges[b][a] for a, b in itertools.pairwise(circle)]
        pytest.fail(f"imports go round: {' <- '.join(circle)}; at {', '.join(places)}")


def test_nothing_private_crosses_a_package() -> None:
    for path in python_files("pensieve", "kernels", "store", "bench"):
        inside = package(module_name(path)) if path.parts[0] != "bench" else "bench"
        for found in imports(path):
            parts = f"{found.module}.{found.name}".split(".")
            private = next((at for at, part in enumerate(parts) if re.match(r"_[^_]", part)), None)
            if private is not None and parts[0] == "pensieve":
                owner = package(".".join(parts[:private]))
                assert within(inside, owner), f"{path}:{found.line}: {'.'.join(parts)} is private to {owner}"


def test_nobody_imports_our_links_by_their_root_names() -> None:
    for path in python_files():
        for found in imports(path):
            assert found.module.split(".")[0] not in ("kernels", "store"), f"{path}:{found.line}"


def test_only_the_edges_know_the_wire_format() -> None:
    for name, path in MODULES.items():
        if any(target(found).startswith("pensieve.v1") for found in imports(path)):
            assert any(within(name, f"pensieve.{edge}") for edge in ("server", "client", "replay")), path


def test_importable_without_torch() -> None:
    modules = [name for name in MODULES if any(name == top or name.startswith(f"{top}.") for top in NO_TORCH)]
    assert {top for top in NO_TORCH if top in MODULES} == set(NO_TORCH), "a name in NO_TORCH is gone"
    script = f"""
        import importlib, sys
        for name in ("torch", "triton"):
            sys.modules[name] = None  # importing it raises ImportError
        for name in {sorted(modules)!r}:
            importlib.import_module(name)
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr


def test_every_third_party_import_is_declared() -> None:
    declared = {
        _normal(re.split(r"[^\w.-]", line)[0]) for line in importlib.metadata.requires("pensieve") or []
    }
    providers = importlib.metadata.packages_distributions()
    for path in SOURCES:
        for found in imports(path):
            top = found.module.split(".")[0]
            if top in sys.stdlib_module_names or top in ("pensieve", "__future__"):
                continue
            owners = {_normal(name) for name in providers.get(top, [])}
            assert owners & declared, (
                f"{path}:{found.line}: {top} is no declared dependency (provided by {owners})"
            )


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_walker_sees_what_it_should(tmp_path: Path) -> None:
    source = tmp_path / "x.py"
    source.write_text(
        "import a\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import no\nelse:\n    import b\n"
        "def f():\n    from c.d import e\nclass K:\n    import g\n"
    )
    found = {(one.module, one.name, one.lazy) for one in imports(source)}
    assert found == {
        ("a", None, False),
        ("typing", "TYPE_CHECKING", False),
        ("b", None, False),
        ("c.d", "e", True),
        ("g", None, False),
    }
