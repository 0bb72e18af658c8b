"""The built-in corpus: real English for a first run on a machine without any data.

Python's own language reference (`pydoc_data.topics`), the docstrings of its standard library (parsed, never
imported), and about a tenth of generated arithmetic, the one task that a tiny model can really learn.
The text differs between versions of Python: no number from it means anything without the version, and none
supports a claim about normalisation.
"""

from __future__ import annotations

import ast
import importlib
import os
import random
import sysconfig
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from siamesenorm.errors import UserError

REVISION = 1
# Documents of like size, so that a split by documents is also one by text.
DOCUMENT_CHARACTERS = 2_000
EQUATIONS = 10_000
EQUATIONS_PER_DOCUMENT = 50
SKIPPED_DIRECTORIES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "__pycache__"}

Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def builtin_documents() -> Iterator[str]:
    """Yield the documents of the built-in corpus, the same on every run of one version of Python (about 2.5 MB).

    Raises `UserError` where Python was installed without its documentation.
    """
    yield from _topics()
    yield from _module_documents()
    yield from _arithmetic_documents()


def _topics() -> Iterator[str]:
    """Yield the language reference, topic by topic."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise UserError("the built-in corpus needs pydoc_data, which this Python lacks: give a text file") from error
    for name in sorted(topics):
        yield from _cut(topics[name].strip().split("\n\n"))


def _module_documents() -> Iterator[str]:
    """Yield the docstrings of the standard library that were not seen before, module by module."""
    root = Path(sysconfig.get_paths()["stdlib"])
    seen: set[str] = set()
    for path in sorted(_source_files(root)):
        # A docstring may occur twice in a module: dict.fromkeys keeps the first, in order.
        docstrings = [text for text in dict.fromkeys(_docstrings(path)) if text not in seen]
        seen.update(docstrings)
        if docstrings:
            yield from _cut([_module_name(path.relative_to(root)), *docstrings])


def _source_files(root: Path) -> Iterator[Path]:
    for directory, names, files in os.walk(root):
        names[:] = [name for name in names if name not in SKIPPED_DIRECTORIES]
        yield from (Path(directory, file) for file in files if file.endswith(".py"))


def _cut(paragraphs: list[str]) -> Iterator[str]:
    """Yield paragraphs joined to documents of at least `DOCUMENT_CHARACTERS`; the last may be shorter."""
    document = ""
    for paragraph in paragraphs:
        document = f"{document}\n\n{paragraph}" if document else paragraph
        if len(document) >= DOCUMENT_CHARACTERS:
            yield document
            document = ""
    if document:
        yield document


def _module_name(relative: Path) -> str:
    """Return the heading of a module's document, such as `Module email.charset`."""
    parts = relative.with_suffix("").parts
    return "Module " + ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a source file; a file that this Python cannot parse has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return
    yield from filter(None, map(ast.get_docstring, _definitions(tree)))


def _definitions(node: Definition) -> Iterator[Definition]:
    """Yield a module and the classes and functions in it, in the order of the source."""
    yield node
    for child in node.body:
        if isinstance(child, Definition):
            yield from _definitions(child)


def _arithmetic_documents() -> Iterator[str]:
    lines = builtin_equations()
    for _ in range(EQUATIONS // EQUATIONS_PER_DOCUMENT):
        yield "\n".join(islice(lines, EQUATIONS_PER_DOCUMENT))


def builtin_equations() -> Iterator[str]:
    """Yield the lines of arithmetic of the built-in corpus."""
    generator = random.Random(0)
    yield from (equation(generator) for _ in range(EQUATIONS))


def equation(generator: random.Random) -> str:
    """Return one line such as `Calculate 85 - 56 = 29`, whole numbers only.

    The mix is that of the set basic_arithmetic: 30 % minus, 26 % plus, 22 % divide, 22 % times; one to three digits.
    """
    operator = generator.choices("-+/*", weights=(914, 783, 652, 651))[0]
    left, right = (generator.randrange(10 ** generator.choice((1, 2, 2, 3))) for _ in range(2))
    if operator == "/":
        # Computed backwards, from a whole quotient and a divisor that is not zero.
        return f"Calculate {left * (right + 1)} / {right + 1} = {left}"
    result = {"-": left - right, "+": left + right, "*": left * right}[operator]
    return f"Calculate {left} {operator} {right} = {result}"
