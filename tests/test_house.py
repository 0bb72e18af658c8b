"""The rules of the architecture: order of imports, no cycles, one class per name, and a core that needs only torch."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import siamesenorm

SOURCE = Path(siamesenorm.__file__).parent
REPOSITORY = Path(__file__).parents[1]
DEPENDS_ON: dict[str, set[str]] = {
    "kernels": set(),
    "norms": {"kernels"},
    "topologies": {"norms"},
    "sublayers": {"norms"},
    "models": {"topologies", "sublayers"},
    "data": set(),
    "tasks": {"models", "data"},
    "training": {"tasks"},
    "evaluation": {"training"},
    "analysis": {"evaluation"},
    "comparison": {"evaluation", "analysis"},
    "recipes": {"comparison", "benchmark"},
    "interop": {"analysis"},
    "benchmark": {"training", "interop"},
    "cli": {"recipes", "interop", "benchmark"},
}
"""The packages that each one imports directly."""
GROUND = {"errors", "files", "options", "progress", "world"}
"""Modules that every package may import, and that import no package."""
CORE = ("kernels", "norms", "topologies", "sublayers", "models")
FILES = sorted(SOURCE.rglob("*.py"))


@cache
def below(package: str) -> frozenset[str]:
    """Return every package that a package may import, itself included."""
    return frozenset({package}).union(*(below(other) for other in DEPENDS_ON[package]))


class Contents(NamedTuple):
    """What the rules ask of a file."""

    docstring: str | None
    imports: set[str]
    classes: list[str]
    strings: list[str]


@cache
def contents(file: Path) -> Contents:
    """Return the full name of everything that a file imports, inside functions too, its classes and its strings."""
    tree = ast.parse(file.read_text())
    found = Contents(ast.get_docstring(tree), set(), [], [])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found.imports.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ClassDef):
            found.classes.append(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.strings.append(node.value)
    return found


def home(file: Path) -> str:
    """Return the package of a file, or the name of a module that stands outside packages."""
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def packages_imported(file: Path) -> set[str]:
    """Return the packages and ground modules of ours that a file imports."""
    ours = [name.split(".")[1] for name in contents(file).imports if name.startswith("siamesenorm.")]
    # What the top level re-exports comes from the models and below; its version is a constant.
    return {part if part in {*DEPENDS_ON, *GROUND} else "models" for part in ours if part != "__version__"}


def foreign(file: Path) -> set[str]:
    """Return the top-level names that a file imports from outside the standard library and this package."""
    return {name.split(".")[0] for name in contents(file).imports} - sys.stdlib_module_names - {"siamesenorm"}


def short(file: Path) -> str:
    return str(file.relative_to(SOURCE))


@pytest.mark.parametrize("file", FILES, ids=short)
def test_imports_run_one_way(file: Path) -> None:
    place = home(file)
    if place == "__main__":
        return
    if place in GROUND:
        assert packages_imported(file) <= GROUND
    else:
        # The top level offers what needs torch alone: the models and what stands below, and the swapping of norms.
        assert packages_imported(file) <= {*below("interop" if place == "__init__" else place), *GROUND}


def test_every_package_has_a_place() -> None:
    assert {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()} <= DEPENDS_ON.keys()
    assert {path.stem for path in SOURCE.glob("*.py")} == {"__init__", "__main__", *GROUND}


def test_the_order_has_no_cycle() -> None:
    for package in DEPENDS_ON:
        assert all(package not in below(other) for other in DEPENDS_ON[package])


@pytest.mark.parametrize("file", [f for f in FILES if home(f) in {*CORE, *GROUND, "__init__"}], ids=short)
def test_the_core_imports_torch_alone(file: Path) -> None:
    """And Triton where kernels are launched, rich where progress is drawn, timm where its blocks are taken.

    These are imported only when used.
    """
    launched = home(file) == "kernels" and file.stem.endswith(("_triton", "_launch"))
    used = {"progress.py": {"rich"}, "models/convnext.py": {"timm"}}.get(short(file), set())
    assert foreign(file) <= {"torch", *({"triton"} if launched else used)}


def test_everything_imported_is_declared() -> None:
    """It stands in a list of requirements, or torch requires it."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {canonical(requirement) for group in groups for requirement in group} | requirements("torch")
    distributions = {"PIL": "pillow", "sklearn": "scikit-learn"}
    imported = {name: short(file) for file in FILES for name in foreign(file)}
    assert {
        name: file for name, file in imported.items() if canonical(distributions.get(name, name)) not in declared
    } == {}


def test_names_say_what_is_inside() -> None:
    nothing = {"utils", "util", "common", "helpers", "helper", "misc"}
    named = {part for file in (*FILES, *Path(__file__).parent.rglob("*.py")) for part in (file.stem, file.parent.name)}
    assert not named & nothing


@pytest.mark.parametrize("file", FILES, ids=short)
def test_every_module_says_what_it_is_for(file: Path) -> None:
    assert contents(file).docstring


# --- files and classes

ENTRY_POINT_GROUPS = {"siamesenorm.topologies", "siamesenorm.norms", "siamesenorm.tasks"}
"""Names of groups, not of modules."""
REPEATED_TO_MEND: set[str] = set()
MODULES = {
    ".".join(("siamesenorm", *file.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): file
    for file in FILES
}


def named_modules(file: Path) -> Iterator[str]:
    """Yield the modules of ours that a file imports, those named in strings included.

    The top level is left out: it imports by name, lazily, whatever is asked for.
    """
    names = set(contents(file).imports)
    for text in contents(file).strings:
        if re.fullmatch(r"siamesenorm(\.\w+)+(:\w+)?", text) and text not in ENTRY_POINT_GROUPS:
            names.add(text.partition(":")[0])
        elif re.fullmatch(r"siamesenorm(\.\w+)+\.", text):  # the rest is formatted in
            names.update(module for module in MODULES if module.startswith(text))
    for name in names:
        while name not in MODULES and "." in name:
            name = name.rpartition(".")[0]
        if name in MODULES and name != "siamesenorm":
            yield name


def test_no_cycle_of_files() -> None:
    graph = {module: set(named_modules(file)) - {module} for module, file in MODULES.items() if module != "siamesenorm"}
    assert list(cycles(graph)) == []


def cycles(graph: dict[str, set[str]]) -> Iterator[tuple[str, ...]]:
    """Yield the groups of nodes that reach each other."""
    reached: dict[str, set[str]] = {}
    for node in graph:
        seen, rest = set(), [node]
        while rest:
            new = graph[rest.pop()] - seen
            seen |= new
            rest.extend(new)
        reached[node] = seen
    yield from {tuple(sorted(o for o in reached[n] if n in reached[o])) for n in graph if n in reached[n]}


def test_a_cycle_is_found() -> None:
    assert list(cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()})) == [("b", "c")]


def test_each_class_name_exists_once() -> None:
    """But for `Arguments`, which every command has."""
    classes = [name for file in FILES for name in contents(file).classes]
    repeated = {name for name, count in Counter(classes).items() if count > 1}
    assert repeated - {"Arguments"} <= REPEATED_TO_MEND


def test_no_file_is_long() -> None:
    assert {short(file): lines for file in FILES if (lines := len(file.read_text().splitlines())) > 400} == {}


def test_every_public_name_can_be_imported() -> None:
    assert all(getattr(siamesenorm, name) is not None for name in siamesenorm.__all__)


# --- the import of the package, in an interpreter of its own


def run_python(program: str, *options: str) -> str:
    result = subprocess.run([sys.executable, *options, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


IMPORT_COST = """
import time, torch
start = time.process_time()
import siamesenorm
siamesenorm.build_language_model  # the public names are imported at the first use of one
print(time.process_time() - start)
"""


def test_import_costs_little_on_top_of_torch() -> None:
    """Processor time, and the least of three: other processes can only add to it."""
    costs = []
    while len(costs) < 3 and not (costs and min(costs) <= 0.3):
        costs.append(float(run_python(IMPORT_COST)))
    assert min(costs) <= 0.3


ONLY_TORCH = """
import sys, warnings
sys.path.append({directory!r})
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
import torch, siamesenorm
norms = siamesenorm.available_norms()
for number, name in enumerate(siamesenorm.available_topologies()):
    norm = norms[number % len(norms)]
    model = siamesenorm.build_language_model("nano", topology=name, norm=norm, depth=2, dim=16, hidden=16)
    model(torch.zeros(1, 4, dtype=torch.int64)).logits.sum().backward()
print(*sys.modules)
"""


def torch_and_its_requirements() -> set[str]:
    """Return the names of the distributions that come with torch."""
    allowed: set[str] = set()
    new = {"torch"}
    while new:
        allowed |= new
        new = {requirement for name in new for requirement in requirements(name)} - allowed
    return allowed


def requirements(distribution: str) -> set[str]:
    try:
        lines = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return set()  # for another platform
    return {canonical(line) for line in lines if "extra ==" not in line}


def canonical(requirement: str) -> str:
    """Return the name of a distribution in a requirement, as names are compared."""
    return re.match(r"[\w.-]+", requirement).group().lower().replace("_", "-")


@pytest.fixture
def only_torch(tmp_path: Path) -> Path:
    """Return a directory of packages that holds torch, what torch requires, and ours."""
    allowed = torch_and_its_requirements()
    for module, owners in importlib.metadata.packages_distributions().items():
        spec = importlib.util.find_spec(module) if allowed & set(map(canonical, owners)) else None
        location = next(iter(spec.submodule_search_locations or [spec.origin])) if spec else None
        if location:
            (tmp_path / Path(location).name).symlink_to(location)
    (tmp_path / "siamesenorm").symlink_to(SOURCE)
    return tmp_path


def test_the_library_works_where_nothing_but_torch_is_installed(only_torch: Path) -> None:
    modules = run_python(ONLY_TORCH.format(directory=str(only_torch)), "-E", "-S").split()
    tops = {name.partition(".")[0] for name in modules}
    absent = {"numpy", "tyro", "rich", "matplotlib", "tokenizers", "safetensors", "pyarrow", "transformers", "timm"}
    assert not absent & {*tops, *(path.name for path in only_torch.iterdir())}
    laboratory = {"training", "data", "comparison", "cli", "evaluation", "analysis", "recipes"}
    assert not laboratory & {name.split(".")[1] for name in modules if name.startswith("siamesenorm.")}
    assert "torch._dynamo" not in modules, "building and running a model loads no compiler: it costs over a second"
