"""Which cases run by default, where `--laws` (`make laws`) runs all: some pairs of a topology and a norm; of tests that
are marked `one_of_each_family`, one topology for each class of connections; of tests that are marked `every_nth(n)`,
every n-th case; and no case that is marked `laws`."""

from __future__ import annotations

from collections import defaultdict

import pytest

TOPOLOGY, NORM = ("topology", "name"), ("norm", "operator")
"""Names of the parameters whose product is thinned out."""
LONGEST = ("test_kernels_interpreter.py", "test_parallel.py", "test_clients.py", "test_sweep.py", "test_examples.py")
"""Files with the longest single tests, which run first: at the end one of two processes would wait for them."""
FAMILIES = {"pre", "hybridnorm", "spannorm", "dhc-2", "mhc-4", "attnres", "siamese-post-pre", "siamese"}
"""A topology of each class of connections."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--laws", action="store_true", help="run every combination of a topology and a norm")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "one_of_each_family: run some topologies, with --laws all of them")
    config.addinivalue_line("markers", "every_nth(n): run every n-th case, with --laws all of them")
    config.addinivalue_line("markers", "laws: run with --laws alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep each topology with the first norm of its test, and each other norm with one of the topologies."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    if config.getoption("--laws"):
        return
    topologies: dict[str, list[str]] = defaultdict(list)
    norms: dict[str, list[str]] = defaultdict(list)
    pairs = {item: pair for item in items if (pair := _pair(item))}
    for item, (topology, norm) in pairs.items():
        for known, value in ((topologies, topology), (norms, norm)):
            if value not in known[_test(item)]:
                known[_test(item)].append(value)

    cases: dict[str, int] = defaultdict(int)

    def is_kept(item: pytest.Item) -> bool:
        if item.get_closest_marker("laws"):
            return False
        if item.get_closest_marker("one_of_each_family") and item.callspec.params["topology"] not in FAMILIES:
            return False
        if sampled := item.get_closest_marker("every_nth"):
            cases[_test(item)] += 1
            return cases[_test(item)] % sampled.args[0] == 1
        mine, others = topologies[_test(item)], len(norms[_test(item)]) - 1
        if item not in pairs or len(mine) < others or others < 2:
            return True
        topology, norm = mine.index(pairs[item][0]), norms[_test(item)].index(pairs[item][1])
        return norm == 0 or topology == 3 * norm % len(mine)

    kept = [is_kept(item) for item in items]
    config.hook.pytest_deselected(items=[item for item, keep in zip(items, kept, strict=True) if not keep])
    items[:] = [item for item, keep in zip(items, kept, strict=True) if keep]


def _test(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _pair(item: pytest.Item) -> tuple[str, str] | None:
    """Return the topology and the norm of a case as texts; None of one that has not both."""
    values = item.callspec.params if hasattr(item, "callspec") else {}
    found = [str(values[name]) for names in (TOPOLOGY, NORM) for name in names if name in values]
    return (found[0], found[1]) if len(found) == 2 else None
