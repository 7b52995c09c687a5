"""Imports go down the list of layers only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LAYERS = (
    ("autopar", "autopar.cli", "autopar.demo", "autopar.profile", "autopar.verify"),
    ("autopar.inputs", "autopar.spawn"),
    ("autopar.configs",),
    ("autopar.modelbatch",),
    ("autopar.api",),
    ("autopar.report", "autopar.optim"),
    ("autopar.runtime",),
    ("autopar.planner",),
    ("autopar.lower",),
    ("autopar.search",),
    ("autopar.cost",),
    ("autopar.options",),
    ("autopar.capture", "autopar.rules", "autopar.plan", "autopar.schedules"),
    ("autopar.ir",),
    ("autopar.hint", "autopar.cluster"),
    ("cost_models", "autopar.errors"),
)
"""Packages and modules, highest first; those on one line do not import each other."""

TOP = LAYERS[0]
"""The command line and what it runs may import each other and the package."""

WITHOUT_TORCH = ("ir", "rules", "cost", "search", "plan", "lower", "schedules")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): path
    for package in ("autopar", "cost_models")
    for path in sorted((ROOT / package).rglob("*.py"))
}


def layer_of(module: str) -> tuple[int, str]:
    """(line, name of the entry) that a module belongs to; the longest entry that fits."""
    fits = [
        (len(entry), line, entry)
        for line, entries in enumerate(LAYERS)
        for entry in entries
        if module == entry or (entry != "autopar" and module.startswith(f"{entry}."))
    ]
    assert fits, f"{module} belongs to no layer; add it to LAYERS"
    _, line, entry = max(fits)
    return line, entry


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(module, line) of every import that runs; those for type checkers alone do not."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: a relative import"
            assert node.module is not None
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield (name if name in MODULES else node.module), node.lineno


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_down(module: str) -> None:
    line, entry = layer_of(module)
    for imported, at in imports(MODULES[module]):
        if imported.partition(".")[0] not in ("autopar", "cost_models"):
            continue
        found, other = layer_of(imported)
        fine = found > line or entry == other or (entry in TOP and other in TOP)
        assert fine, f"{module} line {at} imports {imported}, which is not below it"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_torch_stays_out_of_the_analysis(module: str) -> None:
    package, _, rest = module.partition(".")
    if package != "cost_models" and rest.partition(".")[0] not in WITHOUT_TORCH:
        return
    for imported, at in imports(MODULES[module]):
        assert imported.partition(".")[0] != "torch", f"{module} line {at} imports {imported}"


def test_cost_models_stands_alone() -> None:
    for module, path in MODULES.items():
        if module.startswith("cost_models"):
            for imported, at in imports(path):
                assert not imported.startswith("autopar"), f"{module} line {at}"


def test_no_module_imports_in_a_circle() -> None:
    graph = {
        module: {name for name, _ in imports(path) if name in MODULES and name != module}
        for module, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for name in sorted(graph[module]):
                visit(name, (*path, module))
            done.add(module)

    for module in sorted(MODULES):
        visit(module, ())
