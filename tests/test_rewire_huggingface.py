"""`rewire` on every Hugging Face family: function, generation, gradients, training, saving and loading."""

from __future__ import annotations

import copy
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

import siamesenorm  # noqa: E402
from huggingface_families import build_family, small_inputs  # noqa: E402
from huggingface_hosts import (  # noqa: E402
    DEPTH,
    DIM,
    HOSTS,
    PRE_NORM,
    TOKENS,
    VOCABULARY,
    Wrapped,
    build_config,
    build_host,
    gradients,
    logits,
    moved,
)
from siamesenorm import available_topologies, rewire, swap_norms  # noqa: E402
from siamesenorm.errors import UserError  # noqa: E402
from siamesenorm.interop.huggingface.converted import converted_class  # noqa: E402
from siamesenorm.interop.rewire import record_streams  # noqa: E402
from siamesenorm.interop.wiring import steps_of  # noqa: E402
from siamesenorm.norms import InexactKind  # noqa: E402
from siamesenorm.norms.foreign_norms import looks_like_norm  # noqa: E402

EPS = {InexactKind.NORM_OF_NORM, InexactKind.NORM_OF_MULTIPLE}
EXACT = ("pre", "siamese-post-pre:normalized_input=false")
INEXACT = ("siamese", "siamese-post-pre", "siamese-post-pre:post_norm=lazy,readout=code", "dhc-2", "mhc-4")
FATES = ("kept", "moved", "dropped", "new")
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
PADDED = torch.cat([torch.zeros(1, 3, dtype=torch.int64), TOKENS[:1, :6]], dim=1)
MASK = (PADDED != 0).long()
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),  # peft asks transformers
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),  # peft, of GPT-2's Conv1D
]


def topology_for(family: str) -> str:
    return "siamese-post-pre" if family == "gpt-neox" else "siamese"


def rewired(family: str = "llama", topology: str | None = None, **options: Any) -> tuple[Any, Any]:
    """Return a host and its rewired copy."""
    host = build_host(family, **options)
    model = copy.deepcopy(host)
    rewire(model, topology or topology_for(family))
    return host, model


def close(found: Tensor, expected: Tensor) -> None:
    """See that they are equal up to the eps of a norm of a norm, in tokens of a mean square of 0.05 and more."""
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


# --- the structure


@pytest.mark.every_nth(3)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("family", PRE_NORM)
def test_new_parts_are_in_the_mode_of_the_model(family: str, training: bool) -> None:
    model = build_host(family).train(training)
    rewire(model, topology_for(family))
    assert {module.training for module in model.modules()} == {training}


def test_projections_that_the_host_normalises_get_no_second_norm() -> None:
    model = build_host("qwen3")
    rewire(model, "siamese", preserve=False)
    for layer in model.model.layers:
        projections = layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj
        assert [hasattr(projection, "head_norm") for projection in projections] == [False, False, True]


def test_places_are_numbered_through_the_whole_stack() -> None:
    expected = [place for pair in siamesenorm.transformer_places(3) for place in pair]
    assert [(place.index, place.kind) for place in expected[-2:]] == [(4, "attention"), (5, "mlp")]
    parallel = [place for (place,) in siamesenorm.transformer_places(3, sublayers=[("attention", True)])]
    assert all(place.normalises_input for place in parallel)
    assert [(place.index, place.block, place.previous) for place in parallel] == [
        (0, 0, None), (1, 1, parallel[0]), (2, 2, parallel[1]),
    ]  # fmt: skip


def test_connections_are_those_of_their_places() -> None:
    """Hyper-Connections read another stream at every sublayer, counted through the whole stack."""
    model = build_host("llama")
    rewire(model, "shc-2", preserve=False)
    topology, spec = siamesenorm.build_topology("shc-2"), siamesenorm.ResidualSpec(dim=model.config.hidden_size)
    for block, places in zip(model.model.layers, siamesenorm.transformer_places(len(model.model.layers)), strict=True):
        for connection, place in zip((block.attention_connection, block.mlp_connection), places, strict=True):
            expected = topology.connection(place, spec).state_dict()
            assert all(torch.equal(value, expected[name]) for name, value in connection.state_dict().items())


# --- the function


@pytest.mark.parametrize("family", PRE_NORM)
def test_the_function_is_kept(family: str) -> None:
    host = build_host(family)
    expected = logits(host)
    for topology in (*EXACT, *INEXACT):
        if (family, topology) == ("gpt-neox", "siamese"):
            continue
        model = copy.deepcopy(host)
        report = rewire(model, topology)
        if topology in EXACT and (family != "gpt-neox" or topology == "pre"):
            assert report.function_kept
            assert torch.equal(logits(model), expected), topology
        else:
            assert report.function_kept or {one.kind for one in report.differences} <= EPS
            close(logits(model), expected)


@pytest.mark.parametrize("rms", [0.02, 0.0027])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt-neox", "gpt-neox-sequential"])
def test_a_function_that_is_said_to_be_kept_is_kept_for_small_embeddings(family: str, rms: float) -> None:
    """Where a norm of a norm or of a multiple has another eps than the host's norm, the smallest tokens show it."""
    eps = {"llama": "rms_norm_eps", "gpt2": "layer_norm_epsilon"}.get(family, "layer_norm_eps")
    host = build_host(family, **{eps: 1e-5}).double()
    with torch.no_grad():
        weight = host.get_input_embeddings().weight
        weight.mul_(rms / weight.square().mean().sqrt())
    swap_norms(host, "rmsnorm" if family == "llama" else "layernorm")  # those of transformers compute in fp32
    expected = logits(host)
    for topology in (*EXACT, *INEXACT):
        if (family, topology) == ("gpt-neox", "siamese"):
            continue
        model = copy.deepcopy(host)
        report = rewire(model, topology)
        found = logits(model)
        if report.function_kept:
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        else:
            assert report.bound > 0 and not torch.allclose(found, expected, rtol=1e-9, atol=1e-9), topology


@pytest.mark.parametrize("topology", ["attnres", "attnres:block_size=2", "attnres-full"])
def test_attention_residuals_keep_the_function_and_wake_up(topology: str) -> None:
    """In fp64 and at an eps of 1e-3, where a norm of x / n would differ from that of x; every query learns at once."""
    host = build_host("llama", rms_norm_eps=1e-3).double()
    swap_norms(host, "rmsnorm")
    expected = logits(host)
    model = copy.deepcopy(host)
    assert rewire(model, topology).function_kept
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-9)
    queries = [gradient for name, gradient in gradients(model).items() if name.endswith("mix.query")]
    assert len(queries) == 2 * len(model.model.layers) and all(each.abs().max() > 0 for each in queries)


@pytest.mark.parametrize("topology", ["siamese", "siamese-post-pre", "mhc-4"])
def test_the_function_is_kept_whatever_the_eps(topology: str) -> None:
    for eps in (1e-2, 1e-5):
        host, model = rewired("llama", topology, rms_norm_eps=eps)
        torch.testing.assert_close(logits(model), logits(host), rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", PRE_NORM)
def test_generation_with_a_cache_gives_the_same_tokens(family: str) -> None:
    host, model = rewired(family)
    found = model.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), **GREEDY)
    assert torch.equal(found, host.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), **GREEDY))
    assert torch.equal(found, model.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), use_cache=False, **GREEDY))
    torch.testing.assert_close(cached_logits(model), logits(model), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def cached_logits(model: nn.Module) -> Tensor:
    """Return the logits of tokens that are read in two parts."""
    first = model(TOKENS[:, :5], use_cache=True)
    second = model(TOKENS[:, 5:], past_key_values=first.past_key_values, use_cache=True)
    return torch.cat([first.logits, second.logits], dim=1)


@pytest.mark.parametrize("family", PRE_NORM)
def test_every_zeroed_gain_gets_a_gradient(family: str) -> None:
    _, model = rewired(family)
    found = gradients(model)
    silent = [name for name, parameter in model.named_parameters() if name in found and not parameter.any()]
    assert len(silent) >= DEPTH
    assert all(found[name].abs().max() > 0 for name in silent)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_left_padding_changes_nothing(family: str) -> None:
    host, model = rewired(family)
    positions = (MASK.cumsum(-1) - 1).clamp(min=0)
    padded = logits(model, PADDED, attention_mask=MASK, position_ids=positions)[:, 3:]
    torch.testing.assert_close(padded, logits(model, TOKENS[:1, :6]), rtol=1e-4, atol=1e-4)
    assert torch.equal(
        model.generate(PADDED, attention_mask=MASK, **GREEDY), host.generate(PADDED, attention_mask=MASK, **GREEDY)
    )


def test_attention_is_not_touched() -> None:
    for family in PRE_NORM:
        host, model = rewired(family)
        kept = {name: value for name, value in host.state_dict().items() if "attn" in name or "attention." in name}
        assert kept
        assert all(torch.equal(model.state_dict()[name], value) for name, value in kept.items())


def test_the_report_tells_of_every_norm() -> None:
    host = build_host("gemma2")
    norms = {name for name, module in host.named_modules() if "norm" in type(module).__name__.lower()}
    report = rewire(host, "siamese")
    old = {fate.name: fate for fate in report.norms if fate.outcome != "new"}
    assert old.keys() == norms
    assert {fate.name.partition(".layers.")[2][2:] for fate in old.values() if fate.outcome == "kept"} == {
        "post_attention_layernorm", "post_feedforward_layernorm",
    }  # fmt: skip
    assert {fate.detail for fate in old.values() if fate.outcome == "kept"} == {"part of the sublayer"}
    scratch = build_host("gemma2")
    fates = {fate.name: fate.outcome for fate in rewire(scratch, "siamese", preserve=False).norms}
    assert fates["model.norm"] == fates["model.layers.0.input_layernorm"] == "dropped"
    assert fates["model.layers.1.post_attention_layernorm"] == "kept"


@pytest.mark.every_nth(3)
@pytest.mark.parametrize("preserve", [True, False])
@pytest.mark.parametrize("topology", ["siamese", "pre-embednorm", "hybridnorm", "mhc-4", "olmo2"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt-neox", "olmo2"])
def test_the_report_is_true_of_every_norm_before_and_after(family: str, topology: str, preserve: bool) -> None:
    model = build_host(family)
    if (family, topology) in (("gpt-neox", "siamese"), ("gpt-neox", "hybridnorm")):
        pytest.skip("one connection a block")
    if preserve and (family == "olmo2" or topology not in ("siamese", "mhc-4")):
        pytest.skip("no function to keep")
    before = {name for name, module in model.named_modules() if looks_like_norm(module)}
    report = rewire(model, topology, preserve=preserve)
    after = {name for name, module in model.named_modules() if looks_like_norm(module)}
    reported = {outcome: {fate.name for fate in report.norms if fate.outcome == outcome} for outcome in FATES}
    assert reported["kept"] | reported["moved"] | reported["dropped"] == before
    assert reported["kept"] == before & after and reported["new"] == after - before
    assert not reported["moved" if report.differences is None else "dropped"]


def test_the_report_says_what_moved() -> None:
    moves = {"llama": "its gain goes to", "gpt2": "its gain and bias go to", "olmo": "it has no gain and no bias; "}
    for family, move in moves.items():
        details = [fate.detail for fate in rewire(build_host(family), "siamese").norms if fate.outcome == "moved"]
        assert len(details) == 2 * DEPTH + 1 and all(detail.startswith(move) for detail in details), family


def test_parts_are_in_the_mode_and_the_dtype_of_what_they_replace() -> None:
    model = build_family("gemma").bfloat16()  # its norms return the dtype of their input, whatever that of their gain
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.float()
    gain = moved(model.model.layers[1].input_layernorm).weight.clone()
    model.train()
    model.model.layers[0].self_attn.eval()
    model.model.layers[1].eval()
    rewire(model, "siamese")
    first, second = model.model.layers
    assert not first.self_attn.training and first.opening.training and first.mlp_connection.post_norm.training
    assert not any(module.training for module in second.modules())
    new = second.attention_connection.identity_norm.gain
    assert new.dtype == torch.float32 and torch.equal(new, gain), "not rounded to the dtype of the projections"


# --- other outputs, other heads


@pytest.mark.parametrize("family", ["gptj", "bloom", "falcon", "t5-encoder"])
@torch.no_grad()
def test_streams_are_recorded_of_blocks_that_return_tuples(family: str) -> None:
    model = build_family(family)
    rewire(model, "siamese-post-pre")
    with record_streams(model) as streams:
        model(**small_inputs(model))
    assert len(streams) >= 2 and all(list(one) == ["bounded", "identity"] for one in streams)
    assert len({x.shape for one in streams for x in one.values()}) == 1


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "gpt-neox"])
@torch.no_grad()
def test_hidden_states_are_closed(family: str) -> None:
    host, model = rewired(family)
    with record_streams(model) as streams:
        output = model(TOKENS, output_hidden_states=True)
    states, backbone = output.hidden_states, model.base_model
    assert [state.shape for state in states] == [(2, 9, DIM)] * (DEPTH + 1)
    torch.testing.assert_close(states[0], host(TOKENS, output_hidden_states=True).hidden_states[0])
    closing = next(module for name, module in backbone.named_modules() if name.endswith("closing"))
    for state, one in zip(states[1:], streams, strict=True):
        assert list(one) == ["bounded", "identity"]
        torch.testing.assert_close(state, closing(tuple(one.values())))
    torch.testing.assert_close(states[-1], backbone(TOKENS).last_hidden_state)
    assert torch.equal(model(TOKENS, output_hidden_states=True, return_dict=False)[-1][1], states[1])
    assert isinstance(backbone(TOKENS, return_dict=False), tuple)
    model.config.output_hidden_states = True
    assert torch.equal(model(TOKENS).hidden_states[1], states[1])


@torch.no_grad()
def test_chosen_hidden_states_are_closed() -> None:
    _, model = rewired()
    expected = model(TOKENS, output_hidden_states=True).hidden_states[1]
    first, chosen, last = model(TOKENS, output_hidden_states=[1]).hidden_states
    assert (first, last) == (None, None) and torch.equal(chosen, expected)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt-neox", "olmoe"])
@torch.no_grad()
def test_attentions_and_router_logits_are_still_given(family: str) -> None:
    host, model = rewired(family, attn_implementation="eager")
    wanted = {"output_attentions": True, **({"output_router_logits": True} if family == "olmoe" else {})}
    found, expected = model(TOKENS, **wanted), host(TOKENS, **wanted)
    assert len(found.attentions) == DEPTH
    for one, other in zip(found.attentions, expected.attentions, strict=True):
        close(one, other)
    if family == "olmoe":
        close(torch.stack(found.router_logits), torch.stack(expected.router_logits))


@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
@torch.no_grad()
def test_other_heads(head: str, tmp_path: Path) -> None:
    auto = getattr(transformers, f"AutoModelFor{head}")
    host, model = rewired(auto=auto)
    found, expected = model(TOKENS).to_tuple(), host(TOKENS).to_tuple()
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, Tensor):
            close(one, other)
    model.save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path)
    assert type(loaded) is type(model) and torch.equal(loaded(TOKENS).to_tuple()[0], found[0])


@torch.no_grad()
def test_a_backbone_alone(tmp_path: Path) -> None:
    host, model = rewired(auto=transformers.AutoModel)
    expected = model(TOKENS, output_hidden_states=True)
    close(expected.last_hidden_state, host(TOKENS).last_hidden_state)
    model.save_pretrained(tmp_path)
    for loaded in (transformers.AutoModel.from_pretrained(tmp_path), siamesenorm.from_pretrained(tmp_path)):
        assert type(loaded) is type(model)
        found = loaded(TOKENS, output_hidden_states=True)
        assert all(map(torch.equal, found.hidden_states, expected.hidden_states))


@torch.no_grad()
def test_a_backbone_takes_the_weights_of_a_model_with_a_head_and_the_other_way_round(tmp_path: Path) -> None:
    _, model = rewired("llama-tied")
    swap_norms(model, "seednorm", "model.layers.0.*")
    model.save_pretrained(tmp_path)
    backbone = transformers.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(backbone(TOKENS).last_hidden_state, model.model(TOKENS).last_hidden_state)
    backbone.save_pretrained(tmp_path / "backbone")
    headed = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "backbone")
    assert torch.equal(logits(headed), logits(model))
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(classifier.model(TOKENS).last_hidden_state, model.model(TOKENS).last_hidden_state)


@torch.no_grad()
def test_the_text_model_inside_of_a_multimodal_one(tmp_path: Path) -> None:
    text = {name: value for name, value in HOSTS["gemma3"][1].items() if not name.endswith("_token_id")}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
              "image_size": 8, "patch_size": 4}  # fmt: skip
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4,
                                       boi_token_index=44, eoi_token_index=45, image_token_index=46)  # fmt: skip
    host = moved(transformers.Gemma3ForConditionalGeneration(config))
    model = copy.deepcopy(host)
    rewire(model, "siamese")
    close(logits(model), logits(host))
    model.save_pretrained(tmp_path)
    loaded = siamesenorm.from_pretrained(tmp_path)
    assert type(loaded) is type(model) and torch.equal(logits(loaded), logits(model))
    assert model.model.language_model.config is model.config.text_config is not host.config.text_config


@torch.no_grad()
def test_the_vocabulary_can_grow() -> None:
    host, model = rewired("llama-tied")
    for one in (host, model):
        one.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
        one.get_input_embeddings().weight[-5:] = 0.1
    assert model.config.vocab_size == VOCABULARY + 5
    close(logits(model), logits(host))


# --- training


@pytest.mark.every_nth(3)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", PRE_NORM)
def test_checkpointing_changes_no_gradient(family: str, reentrant: bool) -> None:
    _, model = rewired(family)
    model.train()
    plain = gradients(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    torch.testing.assert_close(gradients(model), plain, rtol=1e-5, atol=1e-6)


@pytest.mark.every_nth(2)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(("family", "topology"), [("llama", "siamese"), ("gpt-neox", "siamese-post-pre")])
def test_a_compiled_training_step_is_the_plain_one(family: str, topology: str) -> None:
    _, model = rewired(family, topology)
    plain = gradients(model.train())
    torch.compiler.reset()
    compiled = gradients(torch.compile(model, backend="aot_eager", fullgraph=True))
    for name, expected in plain.items():
        torch.testing.assert_close(compiled[f"_orig_mod.{name}"], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_bfloat16_stays_bfloat16() -> None:
    host = build_host("llama").bfloat16()
    model = copy.deepcopy(host)
    rewire(model, "siamese")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert logits(model).dtype == torch.bfloat16
    exact = build_host("llama")
    rounding = (logits(host).float() - logits(exact)).abs().max()
    assert (logits(model) - logits(host)).abs().max() < 4 * rounding


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_lora_attaches_saves_and_loads(targets: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    _, model = rewired()
    base, expected = copy.deepcopy(model), logits(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM"))
    assert torch.equal(logits(adapted), expected)
    trained = gradients(adapted)
    assert len(trained) == 2 * DEPTH * (7 if targets == "all-linear" else 2)
    assert all("lora" in name for name in trained)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    assert torch.equal(logits(loaded), logits(adapted)) and not torch.equal(logits(loaded), expected)
    torch.testing.assert_close(logits(loaded.merge_and_unload()), logits(adapted), rtol=1e-4, atol=1e-4)


def test_lora_needs_its_targets() -> None:
    """PEFT has a list of defaults by model type: README.md and docs/what-will-not-work.md say what to give."""
    peft = pytest.importorskip("peft")
    host, model = rewired()
    peft.get_peft_model(host, peft.LoraConfig(task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="specify `target_modules`"):
        peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM"))


@pytest.mark.parametrize("family", PRE_NORM)
def test_lora_attaches_to_every_family(family: str) -> None:
    peft = pytest.importorskip("peft")
    _, model = rewired(family)
    expected = logits(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    torch.testing.assert_close(logits(adapted), expected, rtol=0, atol=0)
    trained = gradients(adapted)
    assert trained and all("lora" in name for name in trained)


# --- from scratch


@pytest.mark.one_of_each_family
@pytest.mark.parametrize("family", ["llama", "gpt-neox-sequential", "olmo2"])
@pytest.mark.parametrize("topology", available_topologies())
def test_every_topology_starts_from_scratch_or_says_why_not(family: str, topology: str) -> None:
    model = build_host(family)
    fused = family == "gpt-neox-sequential"
    if fused and topology in ("siamese", "hybridnorm", "hybridnorm-star", "residual-hybridnorm", "deepnorm"):
        with pytest.raises(UserError, match=r"gpt_neox\.layers\.0"):
            rewire(model, topology, preserve=False)
    else:
        assert rewire(model, topology, preserve=False).differences is None
        assert all(gradient.isfinite().all() for gradient in gradients(model).values())


def test_from_scratch_the_attention_has_the_norm_of_the_topology_under_lora_too(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = build_host("llama")
    rewire(model, "siamese", preserve=False)
    value = model.model.layers[0].self_attn.v_proj
    found = value(torch.randn(2, 3, DIM))
    torch.testing.assert_close(found.square().mean(-1), torch.ones(2, 3), rtol=1e-3, atol=1e-3)
    moved(model).save_pretrained(tmp_path)
    loaded = siamesenorm.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    adapted = peft.get_peft_model(loaded, peft.LoraConfig(target_modules="all-linear")).eval()
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    expected = logits(adapted)
    torch.testing.assert_close(logits(adapted.merge_and_unload()), expected, rtol=1e-4, atol=1e-4)


def test_deepnorm_scales_the_initial_weights_it_declares() -> None:
    host, model = build_host("llama"), build_host("llama")
    rewire(model, "deepnorm", preserve=False)
    beta = (8 * DEPTH) ** -0.25
    for name, factor in (("v_proj", beta), ("o_proj", beta), ("q_proj", 1.0), ("k_proj", 1.0)):
        weight = f"model.layers.1.self_attn.{name}.weight"
        torch.testing.assert_close(model.state_dict()[weight], factor * host.state_dict()[weight])


@torch.no_grad()
def test_deepnorm_scales_what_is_drawn(tmp_path: Path) -> None:
    """Weights of a model that is built, of one that gets its memory later, and what a file lacks; never loaded ones."""
    from safetensors.torch import load_file, save_file

    def scaled(model: nn.Module) -> bool:
        attention = model.get_submodule("model.layers.1.self_attn")
        ratio = attention.v_proj.weight.std() / attention.q_proj.weight.std()
        return bool(ratio == pytest.approx((8 * DEPTH) ** -0.25, rel=0.2))

    config = build_config("llama", num_key_value_heads=2, hidden_size=64, intermediate_size=64)
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config)
    rewire(empty, "deepnorm", preserve=False)
    empty.to_empty(device="cpu").init_weights()
    assert scaled(empty) and logits(empty).isfinite().all()
    before = logits(empty)
    empty.init_weights()
    assert torch.equal(logits(empty), before)
    assert scaled(transformers.AutoModelForCausalLM.from_config(empty.config))
    empty.save_pretrained(tmp_path)
    assert torch.equal(logits(siamesenorm.from_pretrained(tmp_path)), before)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.self_attn.v_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert scaled(loaded)
    assert torch.equal(loaded.model.layers[0].self_attn.v_proj.weight, empty.model.layers[0].self_attn.v_proj.weight)


# --- saving and loading


@pytest.mark.every_nth(3)
@pytest.mark.parametrize("family", HOSTS)
def test_nothing_draws_the_weights_again(family: str, tmp_path: Path) -> None:
    model = build_host(family)
    if family in PRE_NORM:
        rewire(model, topology_for(family))
    else:
        swap_norms(model, "seednorm")
    moved(model).save_pretrained(tmp_path)
    expected = logits(model)
    for source in (model, siamesenorm.from_pretrained(tmp_path)):
        for inner in (source, copy.deepcopy(source)):
            Wrapped(inner)
            assert torch.equal(logits(inner), expected)
            Wrapped(inner.base_model)
            assert torch.equal(logits(inner), expected)
            inner.init_weights()
            assert torch.equal(logits(inner), expected)


def test_nothing_draws_again_what_an_adapter_trained() -> None:
    peft = pytest.importorskip("peft")
    _, model = rewired()
    connections = ["attention_connection", "mlp_connection", "closing"]
    options = {"target_modules": "all-linear", "modules_to_save": connections, "init_lora_weights": False}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**options))
    merged = moved(adapted).merge_and_unload().eval()
    expected = logits(merged)
    Wrapped(merged).init_weights()
    merged.init_weights()
    assert torch.equal(logits(merged), expected)


@torch.no_grad()
def test_inside_another_model_it_is_built_and_loaded(tmp_path: Path) -> None:
    _, model = rewired("gemma2", "dhc-2")

    class Composite(Wrapped):
        def __init__(self, config: Any) -> None:
            super().__init__(transformers.AutoModelForCausalLM.from_config(copy.deepcopy(model.config)))

    whole = Composite(None)
    assert logits(whole.inner).isfinite().all()
    moved(whole).save_pretrained(tmp_path)
    loaded = Composite.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded.inner), logits(whole.inner))


@pytest.mark.every_nth(3)
@pytest.mark.parametrize("family", PRE_NORM)
def test_saving_and_loading_changes_nothing(family: str, tmp_path: Path) -> None:
    for topology in (topology_for(family), "dhc-2", "mhc-4"):
        _, model = rewired(family, topology)
        moved(model).save_pretrained(tmp_path)
        assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".safetensors", ".py"}
        record = json.loads((tmp_path / "config.json").read_text())
        assert record["model_type"] == f"siamesenorm-{build_config(family).model_type}"
        assert record["siamesenorm"] == steps_of(model)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert type(loaded) is type(model) and steps_of(loaded) == steps_of(model) and not loaded.training
        assert {name: value.dtype for name, value in loaded.named_buffers()} == {
            name: value.dtype for name, value in model.named_buffers()
        }
        assert torch.equal(logits(loaded), logits(model)), topology


def test_what_was_loaded_is_saved_and_trained_like_what_was_rewired(tmp_path: Path) -> None:
    _, model = rewired("llama-tied")
    model.generation_config.max_new_tokens = 5
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = siamesenorm.from_pretrained(tmp_path)
    assert loaded.generation_config.max_new_tokens == 5
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert "RewiredLlamaDecoderLayer" in loaded._no_split_modules
    assert gradients(loaded).keys() == gradients(model).keys()
    loaded.train().gradient_checkpointing_enable()
    torch.testing.assert_close(gradients(loaded), gradients(model.train()), rtol=1e-5, atol=1e-6)
    loaded.eval().save_pretrained(tmp_path / "again")
    again = siamesenorm.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again), logits(model))
    records = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path, tmp_path / "again")]
    assert records[0] == records[1]


def test_a_mixture_of_experts_that_was_loaded_from_a_checkpoint(tmp_path: Path) -> None:
    """Its file has a tensor an expert, its model one for all: the library turns one into the other and back."""
    host = build_host("olmoe")
    host.save_pretrained(tmp_path / "host")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "host")
    rewire(model, "siamese")
    model.save_pretrained(tmp_path / "rewired")
    assert torch.equal(logits(siamesenorm.from_pretrained(tmp_path / "rewired")), logits(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_weights_load_in_any_dtype_and_constants_unrounded(dtype: torch.dtype, tmp_path: Path) -> None:
    host, model = rewired()
    for one, directory in ((host, "host"), (model, "model")):
        one.save_pretrained(tmp_path / directory)
    expected, loaded = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / directory, dtype=dtype)
        for directory in ("host", "model")
    )
    rewire(expected, "siamese")
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    assert torch.equal(logits(loaded), logits(expected))
    scales = [value.item() for name, value in loaded.named_buffers() if name.endswith("addition.scale")]
    assert scales == pytest.approx([(2 * (index // 2 + 1)) ** -0.5 for index in range(2 * DEPTH)], rel=1e-7)


def test_a_device_map_is_followed(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    _, model = rewired()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"})
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize(
    ("family", "topology"),
    [("llama", "siamese"), ("llama", "dhc-2"), ("gemma2", "mhc-4"), ("gpt2", "dhc-2"), ("gpt-neox", "dhc-2")],
)
def test_offloaded_blocks_find_their_parameters(family: str, topology: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    _, model = rewired(family, topology)
    model.save_pretrained(tmp_path)
    backbone = model.base_model
    places = dict.fromkeys((name for name, _ in model.named_children()), "cpu")
    del places[model.base_model_prefix]
    for name, module in backbone.named_children():
        parts = {f"{name}.0": "cpu", f"{name}.1": "disk"} if isinstance(module, nn.ModuleList) else {name: "cpu"}
        places.update({f"{model.base_model_prefix}.{part}": place for part, place in parts.items()})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map=places, offload_folder=tmp_path / "offloaded"
    )
    assert any(parameter.is_meta for parameter in loaded.parameters())
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize(("family", "initial"), [("llama", 1.0), ("gemma2", 0.0), ("gemma3", 0.0)])
def test_what_the_files_lack_is_an_error_of_ours(family: str, initial: float, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    _, model = rewired(family)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = "model.layers.1.mlp_connection.post_norm.gain"
    del weights[lost]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"lacks 1 weight \({lost}\): its files"):
        siamesenorm.from_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    # transformers warns, and draws what is missing: a gain of 1, which Gemma's norms store as 0.
    assert (loaded.get_parameter(lost) == initial).all()


def test_weights_without_a_place_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    _, model = rewired()
    model.save_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**record, "host": {**record["host"], "num_hidden_layers": 1}}))
    with pytest.raises(UserError, match=r"no place in the model, \d+ weights \(model.layers.1.\S+, \S+, \S+, \.\.\.\)"):
        siamesenorm.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(record))
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "stray": torch.zeros(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"no place in the model, 1 weight \(stray\)"):
        siamesenorm.from_pretrained(tmp_path)


def test_the_options_of_the_library_apply(tmp_path: Path) -> None:
    _, model = rewired(auto=transformers.AutoModelForSequenceClassification, num_labels=3)
    model.save_pretrained(tmp_path)
    for name in ("dtype", "torch_dtype"):
        loaded = siamesenorm.from_pretrained(tmp_path, **{name: torch.bfloat16})
        assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    with pytest.raises(UserError, match="^output_loading_info: .* leave it out$"):
        siamesenorm.from_pretrained(tmp_path, output_loading_info=True)
    with pytest.raises(UserError, match=r"has in another shape 1 weight \(score.weight\)"):
        siamesenorm.from_pretrained(tmp_path, num_labels=4)
    loaded = siamesenorm.from_pretrained(tmp_path, num_labels=4, ignore_mismatched_sizes=True)
    assert loaded.score.weight.shape[0] == 4


def test_an_error_of_the_library_is_reported_whole_in_one_line(tmp_path: Path) -> None:
    _, model = rewired()
    model.save_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**record, "host": {**record["host"], "hidden_size": "many"}}))
    with pytest.raises(UserError, match=r"^\S+ cannot be loaded: .*'hidden_size': .*many.*$"):
        siamesenorm.from_pretrained(tmp_path)


def test_the_class_of_the_host_does_not_take_it(tmp_path: Path) -> None:
    for family in PRE_NORM:
        host, model = rewired(family)
        model.save_pretrained(tmp_path)
        with pytest.raises(Exception, match="expected int, got NoneType"):
            type(host).from_pretrained(tmp_path)


def test_the_class_of_a_host_without_whole_numbers_of_its_own_does_not_take_it(tmp_path: Path) -> None:
    part = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.SiglipConfig(
        text_config={**part, "vocab_size": 9}, vision_config={**part, "image_size": 8, "patch_size": 4}
    )
    model = transformers.SiglipModel(config)
    swap_norms(model, "seednorm")
    model.save_pretrained(tmp_path)
    assert type(siamesenorm.from_pretrained(tmp_path)) is type(model)
    with pytest.raises(Exception, match="expected float, got NoneType"):
        transformers.SiglipModel.from_pretrained(tmp_path)


def test_the_configuration_of_the_host_is_nested(tmp_path: Path) -> None:
    for family in PRE_NORM:
        _, model = rewired(family)
        model.save_pretrained(tmp_path)
        record = transformers.PreTrainedConfig.from_json_file(tmp_path / "config.json")
        assert record.host["vocab_size"] == VOCABULARY and record.siamesenorm == steps_of(model)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_the_trainer_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")

    def train(**options: Any) -> Any:
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=4, save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
            disable_tqdm=True, logging_strategy="no", learning_rate=0.01,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in TOKENS.repeat(4, 1)]
        trainer = transformers.Trainer(rewired()[1], arguments, train_dataset=data)
        trainer.train(**options)
        return trainer.model.eval()

    whole = train()
    assert torch.equal(logits(train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))), logits(whole))
    assert torch.equal(logits(siamesenorm.from_pretrained(tmp_path / "checkpoint-4")), logits(whole))
    assert not torch.equal(logits(whole), logits(rewired()[1]))


def test_a_configuration_makes_a_new_model_of_the_same_structure() -> None:
    _, model = rewired()
    new = transformers.AutoModelForCausalLM.from_config(model.config)
    assert type(new) is type(model)
    assert {name: value.shape for name, value in new.state_dict().items()} == {
        name: value.shape for name, value in model.state_dict().items()
    }
    empty = type(model.config)()
    with pytest.raises(UserError, match="its configuration holds none"):
        type(model)(empty)


def test_the_configuration_of_the_host_is_left_alone() -> None:
    config = build_config("llama")
    config.name_or_path = "somebody/llama"
    before = config.to_dict()
    first, second = (transformers.AutoModelForCausalLM.from_config(config) for _ in range(2))
    first.config = second.config = first.model.config = second.model.config = config
    rewire(first, "siamese")
    assert config.to_dict() == before and type(config) is transformers.LlamaConfig
    assert second.config is config is second.model.config
    assert first.config is not config and first.config is first.model.config
    assert first.config.name_or_path == first.name_or_path == "", "adapters would note the host as their model"
    assert {type(module.config) for module in first.modules() if hasattr(module, "config")} == {type(first.config)}


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_are_whole(way: str) -> None:
    _, model = rewired()
    if way == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        twin = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert type(twin) is type(model) and type(twin.config) is type(model.config)
    assert torch.equal(logits(twin), logits(model))
    assert twin.model.layers[0].opening is not model.model.layers[0].opening


FRESH = """
import io, sys, pathlib
import torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM
transformers.utils.logging.disable_progress_bar()
directory, tokens = pathlib.Path(sys.argv[1]), torch.tensor([[3, 4, 5]])

def refused(*arguments, **options):
    try:
        AutoModelForCausalLM.from_pretrained(*arguments, **options)
    except ValueError as error:
        return str(error)
    raise SystemExit("taken for a model of transformers")

assert "trust_remote_code=True" in refused(directory, trust_remote_code=False)
plain = directory.parent / "plain"
assert "siamesenorm-llama" in refused(plain), "the same without the file of code"
assert not any(name.startswith("siamesenorm") for name in sys.modules)

remote = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
assert type(remote).__name__ == "SiameseNormLlamaForCausalLM", type(remote)
remote.save_pretrained(directory.parent / "again")
local = AutoModelForCausalLM.from_pretrained(directory.parent / "again")
pickled = torch.load(directory / "model.pt", weights_only=False)
expected = torch.load(directory / "logits.pt")
for model in (remote, local, pickled):
    assert torch.equal(model.eval()(tokens, output_hidden_states=True).logits, expected)
    assert len(model(tokens, output_hidden_states=True).hidden_states) == 3
"""


@pytest.mark.laws
def test_another_process_refuses_it_or_loads_it_by_remote_code_and_pickle(tmp_path: Path) -> None:
    _, model = rewired()
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "plain").mkdir()
    record = json.loads((tmp_path / "model" / "config.json").read_text())
    del record["auto_map"]
    (tmp_path / "plain" / "config.json").write_text(json.dumps(record))
    torch.save(model, tmp_path / "model" / "model.pt")
    torch.save(logits(model, torch.tensor([[3, 4, 5]])), tmp_path / "model" / "logits.pt")
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", FRESH, str(tmp_path / "model")], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr


def test_lists_of_names_know_the_new_class() -> None:
    """By these lists the Trainer shifts labels when it smooths them, and pipelines and tokenizers accept a model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    _, model = rewired("qwen3")
    assert type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    assert TOKENIZER_MAPPING_NAMES["siamesenorm-qwen3"] == TOKENIZER_MAPPING_NAMES["qwen3"]
    assert model.can_generate() and converted_class(type(model)) is type(model)
