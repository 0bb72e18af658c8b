"""Which cases run by default, where `--laws` (`make laws`) runs all: pairs of a topology and a norm, and, of tests that
are marked `one_of_each_family`, one topology for each class of connections."""

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep each topology with the first norm of its test and with one other, in turn, so that every norm stays."""
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

    def is_kept(item: pytest.Item) -> bool:
        if item.get_closest_marker("one_of_each_family"):
            return item.callspec.params["topology"] in FAMILIES
        mine, others = topologies[_test(item)], len(norms[_test(item)]) - 1
        if item not in pairs or len(mine) < others or others < 2:
            return True
        topology, norm = mine.index(pairs[item][0]), norms[_test(item)].index(pairs[item][1])
        return norm in (0, 1 + topology % others)

    config.hook.pytest_deselected(items=[item for item in items if not is_kept(item)])
    items[:] = [item for item in items if is_kept(item)]


def _test(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _pair(item: pytest.Item) -> tuple[str, str] | None:
    """Return the topology and the norm of a case as texts; None of one that has not both."""
    values = item.callspec.params if hasattr(item, "callspec") else {}
    found = [str(values[name]) for names in (TOPOLOGY, NORM) for name in names if name in values]
    return (found[0], found[1]) if len(found) == 2 else None
