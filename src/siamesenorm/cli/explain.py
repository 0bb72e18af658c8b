"""siamesenorm explain: what a topology computes, costs and composes with, all from the registry."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from typing_extensions import Doc

from siamesenorm.errors import UserError
from siamesenorm.models.language import build_language_model
from siamesenorm.models.sizes import SIZES
from siamesenorm.topologies import Topology, available_topologies, build_topology, topology_name
from siamesenorm.training.accounting import count_parameters

EXAMPLE_DIM = 2048
BYTES = 2


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Explain a topology: formula, diagram, cost, special cases, what it composes with, paper; without a name, list."""

    name: Annotated[
        str,
        tyro.conf.Positional,
        Doc(f"Topology, with options as in dhc-2:streams=4: {', '.join(available_topologies())}; empty lists them."),
    ] = ""
    json: bool = False
    """Print JSON."""
    markdown: bool = False
    """Print all topologies as a Markdown page."""


def run(arguments: Arguments) -> None:
    """Print the explanation."""
    if arguments.json and arguments.markdown:
        raise UserError("--json and --markdown exclude each other: choose one")
    if arguments.markdown:
        print(markdown())
    elif not arguments.name:
        topologies = {name: build_topology(name) for name in available_topologies()}
        if arguments.json:
            print(json.dumps({name: topology.heading for name, topology in topologies.items()}, indent=1))
        else:
            width = max(map(len, topologies))
            print("\n".join(f"{name:<{width}}  {t.heading}: {t.paper}" for name, t in topologies.items()))
    else:
        topology = build_topology(arguments.name)
        facts = {**describe(topology), "extra_parameters": extra_parameters(topology)}
        print(json.dumps(facts, indent=1) if arguments.json else text(facts))


def describe(topology: Topology) -> dict[str, Any]:
    """Return what a topology says of itself as JSON values."""
    cost = topology.cost
    return {
        "name": topology_name(topology),
        "title": topology.heading,
        "paper": topology.paper,
        "summary": " ".join((topology.__doc__ or "").split("\n\n")[0].split()),
        "formula": textwrap.dedent(topology.formula),
        "diagram": textwrap.dedent(topology.diagram),
        "options": {field.name: getattr(topology, field.name) for field in dataclasses.fields(topology)},
        "streams": list(topology.stream_names),
        "attention_norm": topology.attention_norm,
        "boundary": cost
        and {
            "forward_passes": cost.forward,
            "backward_passes": cost.backward,
            "saved_tensors": cost.saved,
            "bytes_a_token": round((cost.forward + cost.backward) * EXAMPLE_DIM * BYTES),
        },
        "special_cases": list(topology.special_cases),
        "conditioned_sublayers": topology.modulation_refusal or "composes",
    }


def extra_parameters(topology: Topology) -> dict[str, dict[str, float]]:
    """Return by size the parameters beyond those of Pre-Norm with its usual attention norm, and their share in %."""
    extra = {}
    for size in SIZES:
        ours, _ = count_parameters(build_language_model(size, topology=topology, device="meta"))
        pre, _ = count_parameters(build_language_model(size, topology="pre", device="meta"))
        extra[size] = {"parameters": ours - pre, "percent": 100 * (ours - pre) / pre}
    return extra


def text(facts: dict[str, Any]) -> str:
    """Return the explanation as plain text."""
    options = ", ".join(f"{key}={value}" for key, value in facts["options"].items()) or "none"
    norm = "whole-width QK-norm unless chosen" if facts["attention_norm"] == "auto" else facts["attention_norm"]
    extra = [
        f"  {size:<10} {each['parameters']:>+12,}  {each['percent']:+.4f} %"
        for size, each in facts["extra_parameters"].items()
    ]
    return "\n".join(
        [
            f"{facts['name']}: {facts['title']}",
            facts["paper"],
            "",
            *textwrap.wrap(facts["summary"], 100),
            "",
            textwrap.indent(facts["formula"], "  "),
            "",
            textwrap.indent(facts["diagram"], "  "),
            "",
            _entry("options", [options]),
            _entry("streams", [", ".join(facts["streams"])]),
            _entry("attention norm", [norm]),
            _entry("fused boundary", _boundary(facts["boundary"])),
            _entry("AdaLN sublayers", [facts["conditioned_sublayers"]]),
            _entry("special cases", facts["special_cases"] or ["none"]),
            "parameters beyond Pre-Norm with QK-norm, by size",
            *extra,
        ]
    )


def _entry(name: str, values: list[str]) -> str:
    lines = [line for value in values for line in textwrap.wrap(value, 95, subsequent_indent="  ")]
    return textwrap.indent("\n".join(lines), 17 * " ").replace(17 * " ", f"{name:<17}", 1)


def _boundary(cost: dict[str, Any] | None) -> list[str]:
    if cost is None:
        return ["not declared"]
    return [
        f"{cost['forward_passes']:g} passes of a stream forward, {cost['backward_passes']:g} backward, "
        f"{cost['saved_tensors']:g} kept",
        f"= {cost['bytes_a_token']:,} bytes a token at dim {EXAMPLE_DIM} in bf16",
    ]


def markdown() -> str:
    """Return a page with every topology."""
    sections = [
        "# Topologies",
        "",
        "Made by `siamesenorm explain --markdown` from the registry. `O` is the sublayer's output, `N` a norm; passes",
        "count reads and writes of one `[tokens, dim]` tensor at a fused boundary between two sublayers.",
        "",
        "| name | topology | streams | passes forward + backward | AdaLN sublayers |",
        "|---|---|---|---|---|",
    ]
    topologies = {name: build_topology(name) for name in available_topologies()}
    for name, topology in topologies.items():
        composes = "no" if topology.modulation_refusal else "yes"
        cost = f"{topology.cost.forward:g} + {topology.cost.backward:g}" if topology.cost else "not declared"
        sections.append(
            f"| [`{name}`](#{name}) | {topology.heading} | {', '.join(topology.stream_names)} | {cost} | {composes} |"
        )
    for name, topology in topologies.items():
        facts = describe(topology)
        options = ", ".join(f"`{key}={value}`" for key, value in facts["options"].items()) or "none"
        sections += ["", f"## {name}", "", f"{facts['title']} ({facts['paper']}). {facts['summary']}", "", "```"]
        sections += [facts["formula"], "", facts["diagram"], "```", "", f"Options: {options}."]
        sections += ["", *(f"* {case}" for case in facts["special_cases"])] if facts["special_cases"] else []
        if topology.modulation_refusal:
            sections += ["", f"No conditioned sublayers: {topology.modulation_refusal}."]
    return "\n".join(sections)
