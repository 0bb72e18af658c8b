"""siamesenorm explain: formula, cost and facts of a topology or a norm, from the registries."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import textwrap
from dataclasses import dataclass
from itertools import zip_longest
from typing import Annotated, Any

import tyro
from typing_extensions import Doc

from siamesenorm.errors import UserError, unknown
from siamesenorm.models.cost import count_parameters
from siamesenorm.models.language import SIZES, build_language_model
from siamesenorm.norms import NORMS, NormSpec, available_norms
from siamesenorm.topologies import Topology, available_topologies, build_topology, topology_name

EXAMPLE_DIM = 2048
BYTES = 2


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Explain a topology (formula, diagram, cost, special cases, paper) or a norm; without a name, list all."""

    name: Annotated[
        str,
        tyro.conf.Positional,
        Doc(
            f"Topology, with options as in dhc-2:streams=4: {', '.join(available_topologies())}; or norm: "
            f"{', '.join(available_norms())}. Titles are understood too, such as Pre-Norm. Empty lists them."
        ),
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
        print(json.dumps(listed(), indent=1) if arguments.json else list_text(listed()))
    else:
        subject = find(arguments.name)
        if isinstance(subject, Topology):
            facts, write = {**describe(subject), "extra_parameters": extra_parameters(subject)}, topology_text
        else:
            facts, write = describe_norm(subject), norm_text
        print(json.dumps(facts, indent=1) if arguments.json else write(facts))


def listed() -> dict[str, dict[str, str]]:
    """Return the titles of all topologies, with their papers, and of all norms, by name."""
    topologies = {name: build_topology(name) for name in available_topologies()}
    return {
        "topologies": {name: ": ".join(filter(None, (t.heading, t.paper))) for name, t in topologies.items()},
        "norms": {name: _first_sentence(NORMS[name]) for name in available_norms()},
    }


def list_text(groups: dict[str, dict[str, str]]) -> str:
    """Return the lists as plain text."""
    width = max(len(name) for group in groups.values() for name in group)
    return "\n\n".join(
        "\n".join([f"{what}:", *(f"  {name:<{width}}  {title}" for name, title in group.items())])
        for what, group in groups.items()
    )


def find(text: str) -> Topology | NormSpec:
    """Return the topology or norm of a name or title in any spelling; raises UserError for an unknown one."""
    name, colon, options = text.partition(":")
    found = spellings().get(_plain(name))
    if found is None:
        raise unknown("topology or norm", name, {*available_topologies(), *available_norms()})
    resolved = f"{found}{colon}{options}"
    return NormSpec.parse(resolved) if found in available_norms() else build_topology(resolved)


def spellings() -> dict[str, str]:
    """Return names by spelling without case, hyphens and spaces: names first, then "siamese norm", then titles."""
    topologies = {name: build_topology(name) for name in available_topologies()}
    defaults_first = sorted(topologies, key=lambda name: topologies[name].heading != topologies[name].title)
    pairs = [(name, name) for name in (*topologies, *available_norms())]
    pairs += [(text, name) for name in topologies for text in (f"{name}norm", name.rpartition("-")[0] or name)]
    for name in defaults_first:
        title = topologies[name].title
        pairs += [(part, name) for part in (title, *re.split(r"[(),]", title)) if _plain(part)]
    return {_plain(text): name for text, name in reversed(pairs)}  # the first of a spelling counts


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _first_sentence(subject: type) -> str:
    return " ".join((inspect.getdoc(subject) or "no description").split("\n\n")[0].split())


# --- a norm


def describe_norm(spec: NormSpec) -> dict[str, Any]:
    """Return the facts about a norm as JSON values."""
    norm = spec.build(EXAMPLE_DIM)
    return {
        "name": str(spec),
        "title": type(norm).__name__,
        "description": inspect.getdoc(norm) or "",
        "options": norm.option_defaults() | dict(spec.options),
        "scale_invariant": norm.scale_invariant,
        "idempotent": norm.idempotent,
        "fused_kernels": norm.fusible,
        "parameters": {name: list(parameter.shape) for name, parameter in norm.named_parameters()},
    }


def norm_text(facts: dict[str, Any]) -> str:
    """Return the explanation of a norm as plain text."""
    shapes = [f"{name} {shape}" for name, shape in facts["parameters"].items()]
    entries = {
        "options": _options(facts),
        "scale-invariant": "yes" if facts["scale_invariant"] else "no",
        "idempotent": "yes" if facts["idempotent"] else "no",
        "fused kernels": "yes" if facts["fused_kernels"] else "no",
        "parameters": f"{', '.join(shapes) or 'none'} at dim {EXAMPLE_DIM}",
    }
    return "\n".join([f"{facts['name']}: {facts['title']}", "", facts["description"], "", *_written(entries)])


def _options(facts: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in facts["options"].items()) or "none"


def _written(entries: dict[str, str]) -> list[str]:
    """Return entries as lines, the names in a column beside them; long lines of an entry are wrapped."""
    lines = []
    for name, text in entries.items():
        wrapped = [part for line in text.splitlines() for part in textwrap.wrap(line, 95, subsequent_indent="  ")]
        lines += [f"{start:<17}{part}" for start, part in zip_longest([name], wrapped, fillvalue="")]
    return lines


# --- a topology


def describe(topology: Topology) -> dict[str, Any]:
    """Return the facts about a topology as JSON values."""
    cost = topology.cost
    return {
        "name": topology_name(topology),
        "title": topology.heading,
        "paper": topology.paper,
        "summary": _first_sentence(type(topology)),
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
            "bytes_per_token": round((cost.forward + cost.backward) * EXAMPLE_DIM * BYTES),
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


def topology_text(facts: dict[str, Any]) -> str:
    """Return the explanation of a topology as plain text."""
    norm, cost = facts["attention_norm"], facts["boundary"]
    boundary = cost and (
        f"{cost['forward_passes']:g} passes of a stream forward, {cost['backward_passes']:g} backward, "
        f"{cost['saved_tensors']:g} kept, mean over a model\n"
        f"= {cost['bytes_per_token']:,} bytes per token at dim {EXAMPLE_DIM} in bf16"
    )
    entries = {
        "options": _options(facts),
        "streams": ", ".join(facts["streams"]),
        "attention norm": "whole-width QK-norm unless chosen" if norm == "auto" else norm,
        "boundary": boundary or "cost not declared",
        "AdaLN sublayers": facts["conditioned_sublayers"],
        "special cases": "\n".join(facts["special_cases"]) or "none",
    }
    extra = [
        f"  {size:<10} {each['parameters']:>+12,}  {each['percent']:+.4f} %"
        for size, each in facts["extra_parameters"].items()
    ]
    parts = (
        f"{facts['name']}: {facts['title']}\n{facts['paper'] or 'no paper named'}",
        textwrap.fill(facts["summary"], 100),
        textwrap.indent(facts["formula"] or "no formula written", "  "),
        textwrap.indent(facts["diagram"] or "no diagram drawn", "  "),
        "\n".join([*_written(entries), "parameters beyond Pre-Norm with QK-norm, by size", *extra]),
    )
    return "\n\n".join(parts)


def markdown() -> str:
    """Return a page with every topology."""
    sections = [
        "# Topologies",
        "",
        "Made by `siamesenorm explain --markdown` from the registry. `O` is the sublayer's output, `N` a norm. Passes",
        "count each `[tokens, dim]` tensor that enters or leaves the boundary between two sublayers, or is kept for",
        "the backward pass, once: with fused kernels where the topology has them, as a mean over a model. A tensor",
        "that several boundaries keep is counted at each of them; [cost.md](cost.md) has the memory that was measured.",
        "",
        "| name | topology | streams | passes forward + backward | kept | AdaLN sublayers |",
        "|---|---|---|---|---|---|",
    ]
    topologies = {name: build_topology(name) for name in available_topologies()}
    for name, topology in topologies.items():
        composes = "no" if topology.modulation_refusal else "yes"
        streams, cost = ", ".join(topology.stream_names), topology.cost
        passes = f"{cost.forward:g} + {cost.backward:g} | {cost.saved:g}" if cost else "not declared | not declared"
        sections.append(f"| [`{name}`](#{name}) | {topology.heading} | {streams} | {passes} | {composes} |")
    for name, topology in topologies.items():
        facts = describe(topology)
        options = ", ".join(f"`{key}={value}`" for key, value in facts["options"].items()) or "none"
        sections += ["", f"## {name}", "", f"{facts['title']} ({facts['paper']}). {facts['summary']}", "", "```"]
        sections += [facts["formula"], "", facts["diagram"], "```", "", f"Options: {options}."]
        sections += ["", *(f"* {case}" for case in facts["special_cases"])] if facts["special_cases"] else []
        if topology.modulation_refusal:
            sections += ["", f"No conditioned sublayers: {topology.modulation_refusal}."]
    return "\n".join(sections)
