"""The oracle proves something only as long as the kernels that it judges do not lean on it."""

from __future__ import annotations

from support.sources import imports, python_files

ORACLE = (
    "kernels/reference.py",
    "kernels/expert_reference.py",
    "kernels/fp8_reference.py",
    "kernels/recurrent.py",
)
NAMES = tuple(f"pensieve.{path.removesuffix('.py').replace('/', '.')}." for path in ORACLE)


def test_no_kernel_imports_the_oracle() -> None:
    judged = [path for path in python_files("kernels") if str(path) not in ORACLE]
    assert len(judged) == len(python_files("kernels")) - len(ORACLE)
    leaning = [
        f"{path}:{found.line}"
        for path in judged
        for found in imports(path)
        if f"{found.module}.{found.name}.".startswith(NAMES)
    ]
    assert leaning == []
