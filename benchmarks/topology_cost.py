"""What every topology costs beside Pre-Norm: step time, memory kept for the backward pass, weights to store.

    python benchmarks/topology_cost.py    # writes topology_cost.json and fills the table of docs/cost.md from it

One process with one thread takes a training step of a topology and of Pre-Norm in turn, round after round.
Plain eager PyTorch in fp32: compiled and fused steps are in `siamesenorm bench`.
"""

from __future__ import annotations

import argparse
import gc
import os
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from pages import fill_tables
from siamesenorm.benchmark.results import Results, Row, Session
from siamesenorm.benchmark.step import REFERENCE, StepSettings, TrainingStep, compare
from siamesenorm.models.cost import count_parameters
from siamesenorm.models.language import build_language_model
from siamesenorm.topologies import available_topologies, build_topology

HERE = Path(__file__).parent
FILE, PAGE = HERE / "topology_cost.json", HERE.parent / "docs/cost.md"
CONTROL = "pre + qkv"
"""Pre-Norm with the QKV-norm that HybridNorm and SiameseNorm Hybrid-Pre ask for, which costs something by itself."""
LARGE = "olmo-1.3b"
"""The size at which weights are counted too, without allocating them."""
CPU = torch.device("cpu")


def measure(settings: StepSettings) -> Results:
    """Return a row for every topology of the settings and for the control, each measured in turn with Pre-Norm."""
    torch.set_num_threads(1)
    load = [os.getloadavg()[0]]
    session = Session("topology-cost", settings, CPU)
    reference = TrainingStep.build(REFERENCE, "plain", settings, CPU)
    rows = []
    for name in (*settings.topologies, CONTROL):
        pair = {REFERENCE: reference}
        if name != REFERENCE:  # two models at a time: twenty would fill the memory
            pair[name] = build_step(name, settings)
        row = compare("plain", pair, session)[-1]
        rows.append(row | extra_weights(row))
        del pair
        gc.collect()  # models are in circles, and a collector that counts objects does not see how much they hold
    load.append(os.getloadavg()[0])
    recorded = {**vars(settings), "load_average_before_and_after": load}
    return Results(benchmark="topology-cost", device="cpu", settings=recorded, rows=rows)


def build_step(name: str, settings: StepSettings) -> TrainingStep:
    """Return the training step of a topology or of the control."""
    if name == CONTROL:
        return TrainingStep.build(REFERENCE, "plain", replace(settings, attention_norm="qkv-head"), CPU)
    return TrainingStep.build(name, "plain", settings, CPU)


def extra_weights(row: Row) -> Row:
    """Return the percentage of parameters that a topology adds to Pre-Norm at the measured and at the large size."""
    large, reference = (count_parameters(large_model(name))[0] for name in (row["topology"], REFERENCE))
    return {
        "extra_weights_%": 100 * (row["parameters_to_pre"] - 1),
        f"extra_weights_%_of_{LARGE}": 100 * (large / reference - 1),
    }


def large_model(name: str) -> nn.Module:
    """Return the large size on the meta device, with the attention norm of the measured one."""
    topology = build_topology(REFERENCE if name == CONTROL else name)
    wanted = "qkv-head" if name == CONTROL else StepSettings.attention_norm
    attention_norm = wanted if topology.attention_norm == "auto" else "auto"
    return build_language_model(LARGE, topology=topology, attention_norm=attention_norm, device="meta")


def main() -> None:
    """Measure, write the file and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="rounds in which every topology takes one step")
    measure(StepSettings(topologies=available_topologies(), rounds=parser.parse_args().rounds)).write(FILE)
    PAGE.write_text(fill_tables(PAGE.read_text(), PAGE.parent))


if __name__ == "__main__":
    main()
