"""Files of `interop` import each other in one direction, imports in functions and by name in strings included."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import siamesenorm.interop

PACKAGE = Path(siamesenorm.interop.__file__).parent
SOURCE = PACKAGE.parents[1]
FILES = {".".join(file.relative_to(SOURCE).with_suffix("").parts): file for file in PACKAGE.rglob("*.py")}
FILES = {name.removesuffix(".__init__"): file for name, file in FILES.items()}


def edges(name: str) -> set[str]:
    """Return the files of the package that a file imports anywhere, and those that it names in a string."""
    found: set[str] = set()
    tree = ast.parse(FILES[name].read_text())
    # A file of code that is written beside a model names a module for another process, and so does a docstring.
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, (ast.Expr, ast.Assign))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            found.add(node.value)
    return (found & FILES.keys()) - {name, "siamesenorm.interop"}


def test_no_circle_of_files() -> None:
    assert tuple(TopologicalSorter({name: edges(name) for name in FILES}).static_order())


def test_no_file_is_imported_by_name() -> None:
    for name, file in FILES.items():
        if name.endswith(("callbacks", "libraries", "converted")):
            continue  # these import other libraries, which may be absent
        assert "import_module" not in file.read_text(), name
