"""What docs/what-will-not-work.md says was tried, and the table of docs/cost.md, which is that of its results file."""

from __future__ import annotations

import copy
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from siamesenorm import available_topologies, build_topology, rewire
from siamesenorm.errors import UserError

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

ROOT = Path(__file__).parents[1]
LIMITS = ROOT / "docs/what-will-not-work.md"
LLAMA: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
TOKENS = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
CLOSE = {"rtol": 0, "atol": 1e-3}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),  # peft asks transformers
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def host() -> Any:
    """A Llama whose every weight and gain is something, far from its initial values."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def converted(host: Any, topology: str = "siamese") -> Any:
    model = copy.deepcopy(host)
    rewire(model, topology)
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(TOKENS).logits


# --- serving by transformers itself ----------------------------------------------------------------------------------

WAYS = {
    "greedy": {},
    "beam search": {"num_beams": 3},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "early exit": {"assistant_early_exit": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_generation_gives_the_same_tokens(way: str, host: Any) -> None:
    tokens = TOKENS[:1] if way in ("prompt lookup", "early exit") else TOKENS
    reference = WAYS[way] if way == "beam search" else {}
    expected = copy.deepcopy(host).generate(tokens, **GREEDY, **reference)
    assert torch.equal(converted(host).generate(tokens, **GREEDY, **WAYS[way]), expected)


def test_each_is_a_draft_for_the_other(host: Any) -> None:
    expected = copy.deepcopy(host).generate(TOKENS[:1], **GREEDY)
    for target, draft in ((host, converted(host)), (converted(host), host)):
        found = copy.deepcopy(target).generate(TOKENS[:1], assistant_model=copy.deepcopy(draft), **GREEDY)
        assert torch.equal(found, expected)


# --- what was trained on the original --------------------------------------------------------------------------------


def train_adapter(host: Any, directory: Path, **options: Any) -> torch.Tensor:
    """Save an adapter of random weights for the original, and return the logits with it."""
    model = peft.get_peft_model(copy.deepcopy(host), peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)
    found = logits(model)
    assert not torch.allclose(found, logits(host), atol=0.1)
    return found


def test_adapters_of_the_original_apply(host: Any, tmp_path: Path) -> None:
    expected = train_adapter(host, tmp_path, target_modules="all-linear")
    model = peft.PeftModel.from_pretrained(converted(host), tmp_path).eval()
    torch.testing.assert_close(logits(model), expected, **CLOSE)
    torch.testing.assert_close(logits(model.merge_and_unload()), expected, **CLOSE)


CONNECTIONS = ["attention_connection", "mlp_connection", "closing"]


@pytest.mark.parametrize("saved", [None, CONNECTIONS])
def test_a_new_adapter_wakes_the_second_stream_only_with_its_connections(
    saved: list[str] | None, host: Any, tmp_path: Path
) -> None:
    options = peft.LoraConfig(target_modules="all-linear", modules_to_save=saved)
    model = peft.get_peft_model(converted(host), options).train()
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    torch.testing.assert_close(logits(model), logits(converted(host)), rtol=0, atol=0)
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    gates = [p for name, p in model.named_parameters() if "gate.gain" in name.replace("modules_to_save.default.", "")]
    awake = [bool(gate.any()) for gate in gates if saved is None or gate.requires_grad]
    assert awake == [saved is not None] * LLAMA["num_hidden_layers"]
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(converted(host), tmp_path)
    torch.testing.assert_close(logits(again), logits(model.eval()), **CLOSE)
    torch.testing.assert_close(logits(again.merge_and_unload()), logits(model), **CLOSE)


def test_norms_in_an_adapter_are_dropped_without_a_warning(host: Any, tmp_path: Path) -> None:
    options = {"target_modules": ["q_proj"], "modules_to_save": ["post_attention_layernorm"]}
    expected = train_adapter(host, tmp_path, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        model = peft.PeftModel.from_pretrained(converted(host), tmp_path).eval()
    assert (logits(model) - expected).abs().max() > 0.1


def test_a_hook_on_a_block_sees_packed_streams_and_hidden_states_are_closed(host: Any) -> None:
    model, seen = converted(host), []
    model.model.layers[1].register_forward_hook(lambda block, inputs, output: seen.append(output.shape))
    states = model(TOKENS, output_hidden_states=True).hidden_states
    theirs = host(TOKENS, output_hidden_states=True).hidden_states
    assert seen == [(*TOKENS.shape, 2, LLAMA["hidden_size"])]
    assert {state.shape for state in states} == {(*TOKENS.shape, LLAMA["hidden_size"])}
    for index, same in enumerate((True, False, False, True)):  # the embedding, two raw streams, the normalised end
        assert torch.allclose(states[index], theirs[index], atol=1e-3) is same


# --- weight decay ----------------------------------------------------------------------------------------------------


def test_the_trainer_of_transformers_decays_gates_but_no_norms(host: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = converted(host)
    arguments = transformers.TrainingArguments(tmp_path, use_cpu=True, report_to=[], weight_decay=0.1)
    decayed = transformers.Trainer(model=model, args=arguments).get_decay_parameter_names(model)
    gains = [name for name in decayed if name.endswith("gain")]
    expected = [f"model.layers.{index}.attention_connection.gate.gain" for index in range(LLAMA["num_hidden_layers"])]
    assert sorted(gains) == sorted(expected)
    assert all(not model.get_parameter(name).any() for name in gains), "they are what keeps the second stream silent"


# --- where no conversion exists --------------------------------------------------------------------------------------


def test_the_topologies_without_a_conversion_are_those_of_the_page() -> None:
    refused = set()
    for name in available_topologies():
        try:
            build_topology(name).preserving()
        except UserError:
            refused.add(name)
    (listed,) = re.findall(r"\* (`pre-embednorm`.*?) contain no Pre-Norm model", LIMITS.read_text(), re.DOTALL)
    assert set(re.findall(r"`([^`]+)`", listed)) == refused


@pytest.mark.parametrize("topology", ["pre", "siamese"])
def test_in_bf16_a_conversion_differs_as_bf16_does(topology: str, host: Any) -> None:
    reduced = copy.deepcopy(host).bfloat16()
    rounding = (logits(reduced).float() - logits(host)).abs().max()
    difference = (logits(converted(reduced, topology)) - logits(reduced)).abs().max()
    assert 0 < difference < 3 * rounding


# --- costs -----------------------------------------------------------------------------------------------------------


def test_every_topology_has_a_cost() -> None:
    record = json.loads((ROOT / "benchmarks/topology_cost.json").read_text())
    assert {row["topology"] for row in record["rows"]} == {*available_topologies(), "pre + qkv"}
    assert record["environment"]["threads"] == 1


def test_costs_are_measured_in_turn_with_pre_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    import topology_cost

    settings = topology_cost.StepSettings(
        topologies=("pre", "siamese"), dim=16, depth=1, heads=2, hidden=16, vocabulary=32, batch=1, context=8, rounds=2
    )
    rows = {row["topology"]: row for row in topology_cost.measure(settings).rows}
    assert list(rows) == ["pre", "siamese", "pre + qkv"]
    assert (rows["pre"]["kept_to_pre"], rows["pre"]["extra_weights_%"]) == (1, 0)
    assert rows["siamese"]["kept_to_pre"] > rows["pre + qkv"]["kept_to_pre"] > 1
    assert rows["siamese"]["step_to_pre"]["median"] > 0
