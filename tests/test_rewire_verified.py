"""`rewire` runs what it assumes of a host against the host: wrong assumptions are refused with the difference."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from huggingface_families import build_family, first_output  # noqa: E402
from huggingface_hosts import build_host, logits  # noqa: E402
from siamesenorm import rewire  # noqa: E402
from siamesenorm.errors import UserError  # noqa: E402
from siamesenorm.interop import find_blocks, verify  # noqa: E402
from siamesenorm.interop.block_families import recognise  # noqa: E402
from siamesenorm.interop.rewired_blocks import BlockSpec, SublayerSpec  # noqa: E402


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what other tests have verified."""
    monkeypatch.setattr(verify, "_VERIFIED", set())


Change = Callable[[BlockSpec], BlockSpec]


def with_sublayers(spec: BlockSpec, *sublayers: SublayerSpec) -> BlockSpec:
    """Return the assumption with other sublayers."""
    return dataclasses.replace(spec, form=dataclasses.replace(spec.form, sublayers=sublayers))


def with_paths(sublayer: SublayerSpec, *paths: str) -> SublayerSpec:
    """Return a sublayer with other parts in its only branch."""
    [branch] = sublayer.branches
    return dataclasses.replace(sublayer, branches=(dataclasses.replace(branch, paths=paths),))


def without(part: str) -> Change:
    """Return the assumption that a part of the sublayers is not there."""

    def changed(sublayer: SublayerSpec) -> SublayerSpec:
        branches = tuple(
            dataclasses.replace(branch, paths=tuple(path for path in branch.paths if path != part))
            for branch in sublayer.branches
        )
        joint = tuple(path for path in sublayer.joint if path != part)
        return dataclasses.replace(sublayer, branches=branches, joint=joint)

    return lambda spec: with_sublayers(spec, *map(changed, spec.sublayers))


def parallel(spec: BlockSpec) -> BlockSpec:
    """Assume that attention and MLP read one state, each through its own norm."""
    norms = tuple(sublayer.norm for sublayer in spec.sublayers if sublayer.norm)
    branches = tuple(
        dataclasses.replace(sublayer.branches[0], paths=(norm, *sublayer.branches[0].paths))
        for norm, sublayer in zip(norms, spec.sublayers, strict=True)
    )
    return with_sublayers(spec, SublayerSpec(kind="attention", connection="connection", kept=norms, branches=branches))


def exchanged(spec: BlockSpec) -> BlockSpec:
    """Assume one norm where the other is."""
    first, second = spec.sublayers
    return with_sublayers(
        spec, dataclasses.replace(first, norm=second.norm), dataclasses.replace(second, norm=first.norm)
    )


def moved_to_the_end(spec: BlockSpec) -> BlockSpec:
    """Assume that the dropout of the attention acts on what the MLP returns."""
    first, second = spec.sublayers
    (core, *rest), own = first.branches[0].paths, second.branches[0].paths
    return with_sublayers(spec, with_paths(first, core), with_paths(second, *own, *rest))


def untupled(spec: BlockSpec) -> BlockSpec:
    """Assume that the block returns a tensor."""
    return dataclasses.replace(spec, form=dataclasses.replace(spec.form, returns=0))


def residual_twice(spec: BlockSpec) -> BlockSpec:
    """Assume that a block without a residual multiplier multiplies what its MLP returns by its width."""
    first, second = spec.sublayers
    return with_sublayers(spec, first, with_paths(second, *second.branches[0].paths, "hidden_size"))


def without_the_encoder(spec: BlockSpec) -> BlockSpec:
    """Assume that the cross-attention of a decoder attends to its own state."""
    changed = [
        dataclasses.replace(
            sublayer,
            branches=tuple(
                dataclasses.replace(
                    branch, renamed=tuple(pair for pair in branch.renamed if pair[1] != "key_value_states")
                )
                for branch in sublayer.branches
            ),
        )
        for sublayer in spec.sublayers
    ]
    return with_sublayers(spec, *changed)


WRONG: dict[str, tuple[str, Change, str]] = {
    "multiplier dropped": ("granite", without("residual_multiplier"), "is off by"),
    "multiplier dropped from a mixture": ("granite-moe", without("residual_multiplier"), "is off by"),
    "factor added": ("qwen2", residual_twice, "is off by"),
    "sequential taken for parallel": ("qwen3-moe", parallel, "is off by"),
    "one norm for another": ("starcoder2", exchanged, "is off by"),
    "dropout dropped": ("phi3", without("resid_mlp_dropout"), "in training does not compute"),
    "dropout moved": ("phi3", moved_to_the_end, "in training does not compute"),
    "dropout of a parallel sum dropped": ("falcon", without("config.hidden_dropout"), "in training does not compute"),
    "norm of an output dropped": ("glm4", without("post_self_attn_layernorm"), "is off by"),
    "layer scale dropped": ("dinov2", without("layer_scale2"), "is off by"),
    "tuple taken for a tensor": ("gptj", untupled, "returns a tuple"),
    "states of the encoder dropped": ("t5", without_the_encoder, "decoder.block.0 (T5Block) does not compute"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_assumption_is_refused_with_the_difference(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, change, words = WRONG[wrong]
    model = build_family(family)
    expected, names = first_output(model), list(model.state_dict())

    def assume(block: nn.Module) -> BlockSpec | None:
        spec = recognise(block)
        return None if spec is None else change(spec)

    monkeypatch.setattr(find_blocks, "recognise", assume)
    with pytest.raises(UserError) as caught:
        rewire(model, "siamese-post-pre")
    reason = str(caught.value)
    assert ".0 (" in reason and words in reason and "\n" not in reason
    assert torch.equal(first_output(model), expected) and list(model.state_dict()) == names
    monkeypatch.undo()
    monkeypatch.setattr(verify, "_VERIFIED", set())
    assert rewire(model, "siamese-post-pre").topology is not None


def test_a_block_whose_class_was_patched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_host("llama")
    rewire(copy.deepcopy(model), "siamese-post-pre")
    layer = type(model.model.layers[0])
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda self, x, *args, **kwargs: 2 * forward(self, x, *args, **kwargs))
    with pytest.raises(UserError, match=r"model\.layers\.0 \(LlamaDecoderLayer\) does not compute x \+ self_attn\("):
        rewire(model, "siamese-post-pre")


def test_a_subclass_is_taken_for_what_it_computes() -> None:
    layer, backbone = type(build_host("llama").model.layers[0]), type(build_host("llama").model)

    class ScaledLayer(layer):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return 2 * super().forward(*args, **kwargs)

    class RenamedLayer(layer):  # type: ignore[misc, valid-type]
        pass

    class TwiceModel(backbone):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            super().forward(*args, **kwargs)
            return super().forward(*args, **kwargs)

    class RawModel(backbone):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            hook = self.norm.register_forward_hook(lambda norm, inputs, output: output + inputs[0])
            try:
                return super().forward(*args, **kwargs)
            finally:
                hook.remove()

    for kind, words in ((ScaledLayer, "(ScaledLayer) does not compute"), (RenamedLayer, "")):
        model = build_host("llama")
        for block in model.model.layers:
            block.__class__ = kind
        if words:
            with pytest.raises(UserError) as caught:
                rewire(model, "siamese")
            assert words in str(caught.value)
        else:
            expected = logits(model)
            rewire(model, "siamese-post-pre:normalized_input=false")
            assert torch.equal(logits(model), expected)

    class MeanModel(backbone):  # type: ignore[misc, valid-type]
        """The loop adds the mean over tokens, which for packed streams is one over streams."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            hook = self.layers[1].register_forward_pre_hook(
                lambda block, inputs: (inputs[0] + inputs[0].mean(-2, keepdim=True), *inputs[1:])
            )
            try:
                return super().forward(*args, **kwargs)
            finally:
                hook.remove()

    for kind, words in (
        (TwiceModel, "runs 2 times in one forward"),
        (RawModel, "is not all that follows"),
        (MeanModel, "is not all that follows"),
    ):
        model = build_host("llama")
        model.model.__class__ = kind
        with pytest.raises(UserError, match=words):
            rewire(model, "siamese")


def test_the_check_leaves_no_trace() -> None:
    """Random state, mode, gradients, hooks and weights of the host are what they were; a hook does not run."""
    model, ran = build_host("qwen3"), []
    model.train()
    model.model.layers[0].eval()
    handle = model.model.layers[1].register_forward_hook(lambda *_: ran.append(1))
    stacks = find_blocks.find_blocks(model)
    modes = {name: module.training for name, module in model.named_modules()}
    weights = {name: (value, value.clone(), value._version) for name, value in model.named_parameters()}
    state = torch.random.get_rng_state()
    verify.verify(model, stacks)
    assert torch.equal(torch.random.get_rng_state(), state) and not ran
    assert {name: module.training for name, module in model.named_modules()} == modes
    for name, value in model.named_parameters():
        held, copied, version = weights[name]
        assert value is held and torch.equal(value, copied) and value._version == version and value.grad is None
    handle.remove()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_hosts_in_half_precision_are_verified_in_their_own(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_family("granite").to(dtype)
    change = without("residual_multiplier")
    with monkeypatch.context() as patch:
        patch.setattr(find_blocks, "recognise", lambda block: (spec := recognise(block)) and change(spec))
        with pytest.raises(UserError, match=r"model\.layers\.0 \(GraniteDecoderLayer\) does not compute"):
            rewire(model, "siamese-post-pre")
    assert rewire(model, "siamese-post-pre").function_kept


def test_inputs_of_a_host_may_be_given() -> None:
    holder = build_host("llama")
    assert rewire(holder, "siamese", inputs={"input_ids": torch.tensor([[3, 4, 5, 6]])}).function_kept
    with pytest.raises(UserError, match=r"does not run on small inputs \(.*\): give rewire others, inputs="):
        rewire(build_host("llama"), "siamese", inputs={"pixels": torch.ones(2)})
