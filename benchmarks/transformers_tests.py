"""Run transformers' own common tests of models on the native class and on rewired hosts, and count the outcomes.

    python benchmarks/transformers_tests.py SOURCE --out benchmarks/transformers_tests.json [MODEL ...]

SOURCE is a source tree of the installed version of transformers: its tests/test_modeling_common.py is run, and
tests/generation/test_utils.py and tests/exporters/test_export.py where the tree has them (a checkout does, the source
distribution does not). The tests also need pytest and parameterized. A test skips what does not apply to a model.
"""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import importlib
import json
import os
import sys
import types
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import siamesenorm
from siamesenorm.interop.huggingface import converted_class, modeling
from siamesenorm.interop.huggingface.configuration import SiameseNormConfig

SOURCE = "TRANSFORMERS_SOURCE"
"""The environment variable with the source tree."""
MIXINS = {"generation.test_utils": "GenerationTesterMixin", "exporters.test_export": "ExportTesterMixin"}
"""Tests that a source distribution lacks: by module of the tests, what it would define."""
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 99}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification")


@functools.cache
def native() -> tuple[Any, list[type]]:
    """Return the configuration and the classes of native models."""
    config = SiameseNormConfig(**SIZES, **SPECIAL, intermediate_size=37, num_key_value_heads=2, context=512)
    return config, [getattr(modeling, f"SiameseNorm{head}") for head in HEADS]


@functools.cache
def host(family: str) -> tuple[Any, list[type]]:
    """Return the same of a family of transformers."""
    fields = {**SIZES, **SPECIAL, "max_position_embeddings": 512}
    if family == "GPT2":
        heads = ("Model", "LMHeadModel", "ForSequenceClassification", "ForTokenClassification")
    else:
        heads = HEADS
        fields |= {"intermediate_size": 37, "num_key_value_heads": 2}
    return getattr(transformers, f"{family}Config")(**fields), [getattr(transformers, family + head) for head in heads]


@functools.cache
def rewired(family: str) -> tuple[Any, list[type]]:
    """Return the same of a family after `rewire`."""
    config, classes = host(family)
    model = classes[0](copy.deepcopy(config))
    siamesenorm.rewire(model, "siamese")
    # A configuration that no model was built from names no attention yet.
    new = type(model.config).from_dict(model.config.to_dict())
    return new, [converted_class(each) for each in classes]


MODELS: dict[str, Callable[[], tuple[Any, list[type]]]] = {"native": native}
for _family in ("Llama", "Qwen2", "GPT2"):
    MODELS[_family] = functools.partial(host, _family)
    MODELS[f"rewired-{_family}"] = functools.partial(rewired, _family)


def import_common(source: Path) -> Any:
    """Import the common tests from a source tree, with empty mixins for what the tree lacks."""
    package = types.ModuleType("tests")
    package.__path__ = [str(source / "tests")]
    sys.modules["tests"] = package
    for name, mixin in MIXINS.items():
        if not (source / "tests" / f"{name.replace('.', '/')}.py").is_file():
            for part in (name.partition(".")[0], name):
                sys.modules[f"tests.{part}"] = types.ModuleType(part)
            setattr(sys.modules[f"tests.{name}"], mixin, type(mixin, (), {}))
    return importlib.import_module("tests.test_modeling_common")


class Tester:
    """What the common tests ask for: a configuration, and a batch with a triangular mask of padding."""

    batch_size, seq_length, is_training = 13, 7, True
    num_hidden_layers, hidden_size = SIZES["num_hidden_layers"], SIZES["hidden_size"]
    num_attention_heads, vocab_size = SIZES["num_attention_heads"], SIZES["vocab_size"]

    def __init__(self, build: Callable[[], tuple[Any, list[type]]]) -> None:
        self.get_config: Callable[[], Any] = lambda: copy.deepcopy(build()[0])

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return a new configuration and a random batch."""
        ids = torch.randint(self.vocab_size, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}


def test_case(name: str, common: Any) -> type[unittest.TestCase]:
    """Return the tests of a model."""
    build = MODELS[name]

    def set_up(self: Any) -> None:
        self.model_tester = Tester(build)
        self.all_model_classes = tuple(build()[1])

    bases = (common.ModelTesterMixin, common.GenerationTesterMixin, unittest.TestCase)
    return type(f"Test_{name.replace('-', '_')}", bases, {"setUp": set_up, "__module__": __name__})


if SOURCE in os.environ:  # pytest collects this file
    _common = import_common(Path(os.environ[SOURCE]))
    globals().update({f"Test_{name.replace('-', '_')}": test_case(name, _common) for name in MODELS})


class Record:
    """A plugin of pytest that keeps the outcome of every test; a test fails with any of its parts."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep an outcome and, of a failure, the last line."""
        name = report.nodeid.rpartition("::")[2]
        if report.failed:
            self.outcomes[name] = "failed"
            lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
            self.reasons[name] = next(iter(lines), str(report.longrepr).splitlines()[-1])[2:].strip()
        elif report.skipped or report.when == "call":
            self.outcomes.setdefault(name, report.outcome)


def main() -> None:
    """Run the tests and write the counts and the failures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("models", nargs="*", default=[*MODELS], metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--code", default="now", help="what the rows are of, where several are compared")
    arguments = parser.parse_intermixed_args()
    os.environ[SOURCE] = str(arguments.source.resolve())
    for name in arguments.models:
        record, node = Record(), f"{__file__}::Test_{name.replace('-', '_')}"
        pytest.main([node, "-q", "--no-header", "-p", "no:cacheprovider", "-W", "ignore", "--tb=short"], [record])
        counts = collections.Counter(record.outcomes.values())
        row = {
            **{"model": name, "code": arguments.code, "transformers": transformers.__version__},
            **{"passed": counts["passed"], "failed": counts["failed"], "do_not_apply": counts["skipped"]},
            "failures": record.reasons,
            "skipped": sorted(test for test, outcome in record.outcomes.items() if outcome == "skipped"),
        }
        rows = json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else []
        kept = [each for each in rows if (each["model"], each["code"]) != (name, arguments.code)]
        arguments.out.write_text(json.dumps({"rows": [*kept, row]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
