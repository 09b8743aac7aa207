"""Imports point one way, and the parts that promise to need no torch need none."""

from __future__ import annotations

import graphlib
import importlib.metadata
import itertools
import re
import subprocess
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

import pytest

from support.sources import Import, imports, module_name, python_files

SOURCES = python_files("pensieve", "kernels", "store")
MODULES = {module_name(path): path for path in SOURCES}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "core": set(),
    "config": {"core", "errors"},
    "debug": {"core", "errors"},
    "lifeline": set(),
    "logs": set(),
    "machine": set(),
    "rpc_status": {"errors"},
    "kernels": set(),
    "store": {"core", "errors"},
    "model": {"core", "errors", "kernels", "machine"},
    "tokenizer": {"core", "errors"},
    "client": {"core", "errors", "rpc_status", "v1"},
    "engine": {"core", "errors", "config", "debug", "lifeline", "logs", "kernels", "machine", "model"},
}
"""Part of the package → other parts that it may import. Parts without an entry are only held to have no cycles."""

NO_TORCH = (
    "pensieve.cli.main", "pensieve.client", "pensieve.config", "pensieve.core", "pensieve.engine.cache",
    "pensieve.engine.cost.model", "pensieve.engine.messages", "pensieve.engine.plan", "pensieve.engine.scheduler",
    "pensieve.errors", "pensieve.machine", "pensieve.options.serve", "pensieve.server", "pensieve.store",
)  # fmt: skip
"""Importable where torch and triton do not exist; packages with all their modules."""


def target(found: Import) -> str:
    """The module that an import names: the submodule when it imports one, else the module the name is from."""
    longer = f"{found.module}.{found.name}"
    return longer if longer in MODULES else found.module


def part(module: str) -> str:
    """``pensieve.engine.cache.pool`` → ``engine``; ``pensieve`` itself → ``""``."""
    return module.split(".")[1] if "." in module else ""


def project_imports() -> dict[str, dict[str, str]]:
    """Part → imported part → one place where it does so. Lazy imports count: they hide cycles, not dependencies."""
    edges: dict[str, dict[str, str]] = defaultdict(dict)
    for name, path in MODULES.items():
        for found in imports(path):
            if found.module.split(".")[0] == "pensieve" and part(target(found)) != part(name):
                edges[part(name)].setdefault(part(target(found)), f"{path}:{found.line}")
    return edges


def test_no_cycles_between_parts() -> None:
    edges = project_imports()
    try:
        graphlib.TopologicalSorter({name: set(to) for name, to in edges.items()}).prepare()
    except graphlib.CycleError as error:
        cycle = error.args[1]
        places = [edges[b][a] for a, b in itertools.pairwise(cycle)]
        pytest.fail(f"imports go round: {' <- '.join(cycle)}; at {', '.join(places)}")


@pytest.mark.parametrize("name", sorted(MAY_IMPORT))
def test_imports_point_down(name: str) -> None:
    wrong = {to: place for to, place in project_imports()[name].items() if to not in MAY_IMPORT[name]}
    assert not wrong, f"pensieve.{name} must not import these"


def test_modules_have_no_import_cycles() -> None:
    graph: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        ours = {target(found) for found in imports(path) if not found.lazy and target(found) in MODULES}
        graph[name] = ours - {name}
    graphlib.TopologicalSorter(graph).prepare()


def test_nobody_imports_our_links_by_their_root_names() -> None:
    for path in python_files():
        for found in imports(path):
            assert found.module.split(".")[0] not in ("kernels", "store"), f"{path}:{found.line}"


def test_only_the_edges_know_the_wire_format() -> None:
    for name, path in MODULES.items():
        if any(target(found).startswith("pensieve.v1") for found in imports(path)):
            assert part(name) in ("server", "client", "chat", "replay", "demo"), path


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
