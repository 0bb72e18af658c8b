"""What `rewire` and `swap_norms` refuse: the reason names the module, in one line, and the model is as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from huggingface_families import POST_NORM, build_family  # noqa: E402
from huggingface_hosts import DIM, TOKENS, build_host, logits, moved  # noqa: E402
from siamesenorm import build_language_model, build_norm, rewire, swap_norms  # noqa: E402
from siamesenorm.errors import UserError  # noqa: E402
from siamesenorm.interop.wiring import replay_steps, steps_of  # noqa: E402
from siamesenorm.models.language import LanguageModel  # noqa: E402
from siamesenorm.topologies import available_topologies, build_topology  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),  # peft asks transformers
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Return everything of a model that an operation could change."""
    config = getattr(model, "config", None)
    return {
        "modules": {name: (id(module), type(module), module.training) for name, module in model.named_modules()},
        "parameters": {name: (id(value), value.requires_grad) for name, value in model.named_parameters()},
        "config": (id(config), type(config), config.to_dict() if hasattr(config, "to_dict") else config),
        "steps": steps_of(model),
    }


def refusal(model: nn.Module, operate: Callable[[nn.Module], object]) -> str:
    """Return the reason why an operation is refused, and see that the model is untouched."""
    before, state = snapshot(model), copy.deepcopy(model.state_dict())
    with pytest.raises(UserError) as caught:
        operate(model)
    assert snapshot(model) == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items() if not value.is_meta)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refused(model: nn.Module, topology: str = "siamese-post-pre", **options: Any) -> str:
    return refusal(model, lambda one: rewire(one, topology, **options))


# --- structure


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


def test_unknown_blocks() -> None:
    model = nn.Sequential(nn.Linear(4, DIM), nn.Sequential(*(Block() for _ in range(3))))
    reason = refused(model)
    assert reason.startswith(
        f"the structure of Sequential is unknown: 1.0 is a {__name__}.Block, and its parts (norm, "
    )


def test_no_blocks_at_all() -> None:
    assert "the structure of Linear is unknown: it has no list of blocks" in refused(nn.Linear(2, 2))


@pytest.mark.parametrize("family", POST_NORM)
def test_post_norm_families_are_refused_as_such(family: str) -> None:
    assert "which are Post-Norm: a norm of the sum comes after each addition" in refused(build_family(family))


def test_known_blocks_in_a_list_of_their_own() -> None:
    holder = nn.Module()
    holder.layers, holder.norm = build_host("llama").model.layers, nn.RMSNorm(DIM)
    assert refused(holder).startswith("how to run a Module is not known: give arguments of its forward, inputs=")


def test_blocks_of_several_classes() -> None:
    model = build_host("llama")
    model.model.layers.append(build_host("qwen3").model.layers[0])
    assert "model.layers.2 is a Qwen3DecoderLayer among LlamaDecoderLayers" in refused(model)


def test_blocks_of_one_class_and_two_forms() -> None:
    model = build_host("gpt-neox")
    model.gpt_neox.layers[1].use_parallel_residual = False
    assert "gpt_neox.layers.1 differs from gpt_neox.layers.0" in refused(model)


def test_one_block_in_two_places() -> None:
    model = build_host("llama")
    model.model.layers.append(model.model.layers[0])
    assert "model.layers.2 is model.layers.0 again" in refused(model)


def test_two_stacks() -> None:
    model = nn.ModuleDict({name: build_host("llama").model.layers for name in ("actor", "critic")})
    assert "2 stacks of blocks, actor, critic" in refused(model)


def test_cross_attention() -> None:
    assert "GPT2Block with cross-attention: rewire supports that of T5" in refused(
        build_host("gpt2", add_cross_attention=True)
    )


def test_rewired_already() -> None:
    model = build_host("llama")
    rewire(model, "siamese")
    reason = refused(model)
    assert reason == (
        "model.layers.0 is a RewiredLlamaDecoderLayer: the model has been rewired already; rewire the original"
    )
    step = steps_of(model)[0]
    assert "rewired already" in refusal(model, lambda one: replay_steps(one, [step]))


def test_parallel_sublayers_have_no_hybrid_form() -> None:
    reason = refused(build_host("gpt-neox"), "siamese")
    assert "siamese on GPTNeoXLayer" in reason and "in parallel" in reason
    assert "siamese-post-pre" in reason
    assert "in parallel" in refused(build_host("gpt-neox"), "hybridnorm", preserve=False)


def test_raw_streams_have_no_function_preserving_form() -> None:
    for topology in ("siamese", "siamese-post-pre", "pre", "mhc-4"):
        reason = refused(build_host("olmo2"), topology)
        assert "model.layers has blocks of class Olmo2DecoderLayer, whose sublayers read the raw stream" in reason
        assert topology in reason and "preserve=False" in reason


CONTAIN_PRE_NORM = (
    "pre", "ln-scaling", "layerscale", "lambdas", "shc-2", "dhc-2", "mhc-4", "attnres", "attnres-full", "siamese",
    "siamese-post-pre",
)  # fmt: skip


@pytest.mark.every_nth(3)
@pytest.mark.parametrize("topology", available_topologies())
def test_topologies_that_contain_no_pre_norm_model(topology: str) -> None:
    model = build_host("llama")
    if topology in CONTAIN_PRE_NORM:
        expected = logits(model)
        assert rewire(model, topology).differences is not None
        torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-3)
    else:
        assert build_topology(topology).title in refused(model, topology)


# --- norms


def shared_inside_a_block(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm = model.model.layers[1].input_layernorm


def shared_between_blocks(model: Any) -> None:
    model.model.layers[1].input_layernorm.weight = model.model.layers[0].input_layernorm.weight


def shared_with_a_module_elsewhere(model: Any) -> None:
    model.extra = model.model.layers[1].input_layernorm


def shared_with_the_final(model: Any) -> None:
    model.model.norm = model.model.layers[1].post_attention_layernorm


@pytest.mark.parametrize(
    ("share", "first", "second"),
    [
        (shared_inside_a_block, "model.layers.1.input_layernorm", "model.layers.1.post_attention_layernorm"),
        (shared_between_blocks, "model.layers.0.input_layernorm", "model.layers.1.input_layernorm"),
        (shared_with_a_module_elsewhere, "model.layers.1.input_layernorm", "extra"),
        (shared_with_the_final, "model.layers.1.post_attention_layernorm", "model.norm"),
    ],
)
def test_a_norm_that_sublayers_share(share: Callable[[Any], None], first: str, second: str) -> None:
    model = build_host("llama")
    share(model)
    reason = refused(model)
    assert reason == f"{second} shares its norm with {first}: give each sublayer its own norm first"


class ConditionedRMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.1


def test_a_norm_of_an_unknown_formula() -> None:
    model = build_host("llama")
    model.model.layers[1].post_attention_layernorm = ConditionedRMSNorm(DIM)
    reason = refused(model)
    assert reason.startswith("model.layers.1.post_attention_layernorm is no norm that rewire understands: its values")


def test_a_norm_with_a_hook() -> None:
    model = build_host("llama")
    model.model.norm.register_forward_hook(lambda *_: None)
    assert "model.norm is no norm that rewire understands: it has hooks" in refused(model)


@pytest.mark.parametrize(
    ("family", "norm", "what"),
    [
        ("llama", "layernorm", "rmsnorm became layernorm|the mean is subtracted"),
        ("gpt2", "rmsnorm", "the mean is no longer subtracted"),
        ("gpt2", "seednorm", "the mean is no longer subtracted"),
        ("gpt2", "layernorm:bias=false", "the bias is dropped"),
        ("llama", "seednorm:without=gamma", "there is no gamma"),
        ("llama", "dyt", "rmsnorm became dyt"),
        ("llama", "rmsnorm:eps=0.01", "model.layers.0.input_layernorm: eps 1e-06 became 0.01"),
    ],
)
def test_an_operator_that_cannot_keep_the_function(family: str, norm: str, what: str) -> None:
    reason = refused(build_host(family), norm=norm)
    assert reason.startswith(f"norm {norm.partition(':')[0]}")
    assert "cannot keep the function of the host's norms" in reason and any(part in reason for part in what.split("|"))
    assert rewire(build_host(family), "siamese-post-pre", norm=norm, preserve=False).differences is None


def test_a_norm_that_learned_something_no_new_place_holds() -> None:
    model = build_host("llama")
    swap_norms(model, "seednorm")
    moved(model)
    assert "the dynamic coefficient starts anew" in refused(model)


def test_norms_of_several_kinds_are_named() -> None:
    one_eps = build_host("llama")
    one_eps.model.norm.variance_epsilon = 0.1
    reason = refused(one_eps)
    assert "model.norm: eps 0.1 became 1e-06" in reason and "swap_norms" in reason
    learned = build_host("llama")
    swap_norms(learned, "seednorm", "model.layers.1.*")
    assert "model.layers.1.input_layernorm: seednorm became rmsnorm" in refused(moved(learned))


def test_unknown_names() -> None:
    assert "did you mean siamese" in refused(build_host("llama"), "siamse")
    assert "did you mean rmsnorm" in refused(build_host("llama"), norm="rmsnrom")


# --- states of a model in which nothing can be done, or nothing saved


@pytest.mark.parametrize("part", ["model.layers.1", "model"])
def test_a_forward_that_was_replaced(part: str) -> None:
    model = build_host("llama")
    module = model.get_submodule(part)
    module.forward = module.forward
    assert refused(model).startswith(f"{part} has had its forward replaced")


def test_weights_that_are_not_there() -> None:
    model = build_host("llama").to("meta")
    assert "model.layers is on the meta device" in refused(model)
    with torch.device("meta"):
        assert rewire(model, "siamese", preserve=False).differences is None
    assert all(parameter.is_meta for parameter in model.parameters())


OPERATIONS: dict[str, Callable[[nn.Module], object]] = {
    "rewire": lambda model: rewire(model, "siamese"),
    "swap the norms of": lambda model: swap_norms(model, "seednorm"),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_model_inside_of_another_module(operation: str) -> None:
    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = build_host("llama")

    reason = refusal(Trained(), OPERATIONS[operation])
    expected = (
        f"network is a LlamaForCausalLM inside a Trained, and saves by itself: {operation} it before it is wrapped"
    )
    assert reason == expected


def native(**fields: Any) -> LanguageModel:
    return build_language_model("nano", topology="pre", depth=2, dim=DIM, heads=2, context=12, vocabulary=48, **fields)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_model_of_this_library_inside_of_another_module(operation: str) -> None:
    from siamesenorm.interop.huggingface import SiameseNormForCausalLM

    reason = refusal(nn.Sequential(native()), OPERATIONS[operation])
    assert reason.startswith("0 is a LanguageModel") and operation in reason
    reason = refusal(SiameseNormForCausalLM.from_native(native()), OPERATIONS[operation])
    assert reason.startswith("it is a SiameseNormForCausalLM") and operation in reason


def test_blocks_that_were_built_with_connections_were_never_rewired() -> None:
    reason = refused(native().blocks)
    assert reason.startswith("0.attention_connection is a BoundaryConnection: the blocks have connections of this")
    assert reason.endswith("build them with another topology")


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("rewire", "the configuration is damaged"),
        ({"operation": "rewire"}, "the configuration is damaged"),
        (["rewire"], "the configuration is damaged"),
        ([{"operation": "rewire"}], "the record of rewire lacks 'topology'"),
        (
            [{"operation": "rewire", "topology": "siamese", "norm": {}, "attention_norm": None}],
            "topology in the record",
        ),
        ([{"operation": "swap_norms", "norm": {"name": "rmsnorm"}}], "the record of swap_norms lacks 'names'"),
        ([{"operation": "anneal"}], "unknown operation of siamesenorm 'anneal'"),
    ],
)
def test_a_damaged_record(record: Any, words: str) -> None:
    assert words in refusal(build_host("llama"), lambda model: replay_steps(model, record))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("way", ["the wrapper", "the model inside"])
def test_a_model_with_adapters(operation: str, way: str) -> None:
    peft = pytest.importorskip("peft")
    model = build_host("llama")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    reason = refusal(adapted if way == "the wrapper" else model, OPERATIONS[operation])
    remedies = "merge and unload it, swap the norms of the model, and", "merge and unload it, rewire the model, and"
    assert any(remedy in reason for remedy in remedies) or "inside a" in reason
    expected, plain = logits(adapted.eval()), adapted.merge_and_unload()
    rewire(plain, "siamese")
    torch.testing.assert_close(logits(plain), expected, rtol=1e-3, atol=1e-3)


def test_a_compiled_model() -> None:
    model = torch.compile(build_host("llama"), backend="eager")
    assert "_orig_mod is a LlamaForCausalLM inside a OptimizedModule" in refused(model)


# --- what is not refused


def test_forward_hooks_on_blocks_go_on() -> None:
    model, seen = build_host("llama"), []
    model.model.layers[0].register_forward_hook(lambda module, args, output: seen.append(type(module).__name__))
    rewire(model, "siamese")
    logits(model)
    assert seen == ["RewiredLlamaDecoderLayer"]


def test_linear_layers_of_any_class_are_left_alone() -> None:
    class Int8Linear(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.scale = linear.weight.abs().max().item() / 127
            self.weight = nn.Parameter((linear.weight / self.scale).round().to(torch.int8), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)

    model = build_host("llama")
    for block in model.model.layers:
        for path in ("self_attn.q_proj", "mlp.up_proj"):
            block.set_submodule(path, Int8Linear(block.get_submodule(path)))
    expected = logits(model)
    rewire(model, "siamese-post-pre:normalized_input=false")
    assert torch.equal(logits(model), expected)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.int8, torch.float32}


def test_norms_of_this_library_keep_their_operator() -> None:
    model = build_host("llama")
    swap_norms(model, "seednorm:heads=2")
    expected = model(TOKENS).logits
    report = rewire(model, "siamese-post-pre:normalized_input=false")
    assert report.function_kept and torch.equal(model(TOKENS).logits, expected)
    post_norm = model.model.layers[1].mlp_connection.identity_norm
    assert type(post_norm) is type(build_norm("seednorm", DIM)) and post_norm.heads == 2


@pytest.mark.parametrize("given", ["gpt2", 3, None])
def test_what_is_no_model(given: Any) -> None:
    for convert in OPERATIONS.values():
        with pytest.raises(UserError) as caught:
            convert(given)
        assert repr(given) in str(caught.value) and "\n" not in str(caught.value)
