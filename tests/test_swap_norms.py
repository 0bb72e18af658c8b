"""`swap_norms` on stand-ins for the norm classes of torch, timm and transformers, which are written as those are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import siamesenorm
from siamesenorm import build_language_model, swap_norms
from siamesenorm.errors import UserError
from siamesenorm.norms import DyT, InexactKind, LayerNorm, RMSNorm, ScaleNorm, SeeDNorm, build_norm

DIM = 8
Module = TypeVar("Module", bound=nn.Module)


class LlamaRMSNorm(nn.Module):
    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)


class T5LayerNorm(LlamaRMSNorm):
    """An RMSNorm in spite of its name."""


class GemmaRMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class Gemma3nRMSNorm(GemmaRMSNorm):
    """Of Gemma's family, and multiplies by the weight itself."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).type_as(x)


class NemotronLayerNorm1P(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class RmsNorm(nn.Module):
    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.normalized_shape = (channels,)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class ConvNextLayerNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.eps, self.data_format = 1e-6, "channels_first"

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        x = centred / torch.sqrt(centred.pow(2).mean(1, keepdim=True) + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class EpsOutsideRMSNorm(RmsNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)


class UnbiasedLayerNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        centred = input - input.mean(-1, keepdim=True)
        return self.weight * centred / torch.sqrt(input.var(-1, keepdim=True) + self.eps) + self.bias


class RMSNormGated(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(hidden_states)


def trained(module: Module) -> Module:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return module


def model(*norms: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, DIM), *norms)


def swaps_with_its_function(model: nn.Module, target: str) -> bool:
    """Swap norm "1" and return whether the function was kept; a norm of the target's class already counts."""
    report = swap_norms(model, target)
    assert not report.refused
    assert [name for name, _ in report.kept] + [one.name for one in report.replaced] == ["1"]
    return report.function_kept


def tokens(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, DIM)), generator=torch.Generator().manual_seed(8))


RMS_LIKE: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.RMSNorm(DIM),
    lambda: nn.RMSNorm(DIM, eps=1e-3),
    lambda: LlamaRMSNorm(DIM),
    lambda: T5LayerNorm(DIM),
    lambda: GemmaRMSNorm(DIM, eps=1e-4),
    lambda: Gemma3nRMSNorm(DIM),
    lambda: RmsNorm(DIM),
    lambda: RMSNorm(DIM, eps=1e-2, offset=1.0),
    lambda: SeeDNorm(DIM, eps=1e-2, alpha_initial=3.0),
)
LAYER_LIKE: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.LayerNorm(DIM, eps=1e-3),
    lambda: nn.LayerNorm(DIM, bias=False),
    lambda: NemotronLayerNorm1P(DIM),
    lambda: LayerNorm(DIM, eps=1e-2),
)


def kind(make: Callable[[], nn.Module]) -> str:
    return type(make()).__name__


@pytest.mark.parametrize("target", ["rmsnorm", "seednorm", "seednorm:heads=4", "seednorm:activation=sigmoid"])
@pytest.mark.parametrize("make", RMS_LIKE, ids=kind)
def test_rms_norms_keep_their_function(make: Callable[[], nn.Module], target: str) -> None:
    old = make()
    if isinstance(old, SeeDNorm):
        old.gamma.data += tokens(DIM)
    else:
        trained(old)
    new = model(copy.deepcopy(old))
    assert swaps_with_its_function(new, target)
    small = tokens() * torch.tensor([[1.0], [1e-3], [30.0]])
    torch.testing.assert_close(new[1](small), old(small), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("make", LAYER_LIKE, ids=kind)
def test_layer_norms_keep_their_function_as_layer_norms_only(make: Callable[[], nn.Module]) -> None:
    old = trained(make())
    same, other = model(copy.deepcopy(old)), model(copy.deepcopy(old))
    assert swaps_with_its_function(same, "layernorm")
    small = tokens() * torch.tensor([[1.0], [1e-3], [30.0]])
    torch.testing.assert_close(same[1](small), old(small), rtol=2e-6, atol=1e-6)

    report = swap_norms(other, "rmsnorm")
    found = [difference.kind for difference in report.replaced[0].differences]
    assert found == [InexactKind.STATISTIC, *([InexactKind.BIAS_DROPPED] if old.bias is not None else [])]
    centred = tokens() - tokens().mean(-1, keepdim=True)
    bias = 0 if old.bias is None else old.bias
    torch.testing.assert_close(other[1](centred), old(centred) - bias, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("make", [lambda: LayerNorm2d(DIM, eps=1e-4), lambda: ConvNextLayerNorm(DIM)], ids=kind)
def test_channels_first_stays_channels_first(make: Callable[[], nn.Module]) -> None:
    old, images = trained(make()), tokens(2, DIM, 3, 5)
    new = nn.Sequential(nn.Conv2d(3, DIM, 1), copy.deepcopy(old))
    assert swaps_with_its_function(new, "layernorm")
    torch.testing.assert_close(new[1](images), old(images), rtol=2e-6, atol=1e-6)
    assert new[1].axis == 1


def test_seednorm_equals_the_rmsnorm_it_replaces_bit_for_bit() -> None:
    old = trained(RMSNorm(DIM, offset=1.0)).to(torch.bfloat16)
    new = model(copy.deepcopy(old))
    swap_norms(new, "seednorm:heads=2")
    x = tokens().to(torch.bfloat16)
    assert torch.equal(new[1](x), old(x))
    assert new[1].offset == 1.0  # 1 + w is not a bf16 number, w is


def test_the_unwritten_eps_of_torch_is_that_of_its_wide_arithmetic() -> None:
    old = nn.RMSNorm(DIM).to(torch.bfloat16)
    new = model(copy.deepcopy(old))
    assert swaps_with_its_function(new, "rmsnorm")
    tiny = (1e-3 * tokens()).to(torch.bfloat16)
    torch.testing.assert_close(new[1](tiny), old(tiny), rtol=1e-2, atol=0)


def kinds(model: nn.Module, norm: str, where: str | None = None) -> list[InexactKind]:
    """Replace one norm and return in what it differs."""
    (replaced,) = swap_norms(model, norm, where=where).replaced
    return [difference.kind for difference in replaced.differences]


def test_what_is_not_the_function_is_said() -> None:
    new = model(trained(GemmaRMSNorm(DIM)).to(torch.bfloat16), trained(nn.RMSNorm(DIM)), trained(nn.LayerNorm(DIM)))
    (eps,) = swap_norms(new, "rmsnorm:offset=0.0,eps=0.01", where="2").replaced[0].differences
    assert eps.kind == InexactKind.EPS and 0.99 < eps.bound < 1
    gemma = copy.deepcopy(new)
    assert kinds(gemma, "scalenorm", "1") == [InexactKind.STATISTIC, InexactKind.GAIN_AVERAGED]
    assert kinds(new, "seednorm:without=gamma", "1") == [InexactKind.GAIN_DROPPED]
    assert kinds(new, "dyt", "3") == [InexactKind.STATISTIC]


def test_gain_and_bias_are_carried_over_where_the_function_cannot_be() -> None:
    norm = trained(nn.LayerNorm(DIM))
    weight, bias = norm.weight.detach().clone(), norm.bias.detach().clone()
    new = model(norm)
    swap_norms(new, "dyt")
    assert isinstance(new[1], DyT) and torch.equal(new[1].gain, weight) and torch.equal(new[1].bias, bias)
    swap_norms(new, "scalenorm")
    assert isinstance(new[1], ScaleNorm)
    torch.testing.assert_close(new[1].gain.item(), weight.mean().item() * DIM**0.5)


def test_a_dyt_with_another_coefficient_is_not_passed_off_as_kept() -> None:
    assert not swaps_with_its_function(model(build_norm("dyt:alpha_initial=2.0", DIM)), "dyt:alpha_initial=0.3")


def test_a_language_model_of_dyt_is_built_and_not_swapped() -> None:
    language = build_language_model("nano", topology="pre", norm="dyt", vocabulary=11)
    with pytest.raises(UserError, match="build the model with it"):
        swap_norms(language, "dyt:alpha_initial=0.3")


def test_the_choice_of_kernels_is_carried_over() -> None:
    language = build_language_model("nano", topology="pre", vocabulary=11, kernels="plain")
    swap_norms(language, "seednorm")
    assert {norm.kernels for norm in language.modules() if isinstance(norm, SeeDNorm)} == {"plain"}


def test_a_learned_dynamic_term_is_not_passed_off_as_kept() -> None:
    new = model(trained(SeeDNorm(DIM)))
    assert kinds(new, "rmsnorm") == [InexactKind.STATISTIC]


def test_dtype_device_training_and_gradients_are_preserved() -> None:
    frozen = LlamaRMSNorm(DIM).to(torch.bfloat16).eval().requires_grad_(False)
    learned = nn.LayerNorm(DIM, device="meta").train()
    plain = nn.LayerNorm(DIM, elementwise_affine=False)
    new = nn.Sequential(nn.Linear(DIM, DIM).half(), frozen, learned, plain)
    report = swap_norms(new, "seednorm")
    assert [one.name for one in report.replaced] == ["1", "2", "3"]
    assert {p.dtype for p in new[1].parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in new[1].parameters()) and not new[1].training
    assert all(p.is_meta and p.requires_grad for p in new[2].parameters()) and new[2].training
    assert dict(new[3].named_parameters()).keys() == {"alpha", "beta"}  # affine-free stays affine-free
    assert {p.dtype for p in new[3].parameters()} == {torch.float16}


def test_where_selects_by_pattern_or_predicate() -> None:
    new = nn.ModuleDict({"attention": model(nn.LayerNorm(DIM)), "mlp": model(nn.LayerNorm(DIM))})
    assert [one.name for one in swap_norms(new, "rmsnorm", where="attention.*").replaced] == ["attention.1"]
    assert isinstance(new["mlp"][1], nn.LayerNorm)
    report = swap_norms(new, "rmsnorm", where=lambda name: name.startswith("mlp"))
    assert report.kept == (("attention.1", "not selected"),)
    assert swap_norms(new, "rmsnorm").kept == (
        ("attention.1", "is rmsnorm already"),
        ("mlp.1", "is rmsnorm already"),
    )
    with pytest.raises(UserError, match=r"where='\*.norm9' selects no norm: the model has attention.1, mlp.1$"):
        swap_norms(new, "rmsnorm", where="*.norm9")
    with pytest.raises(UserError, match=r"the model has none$"):
        swap_norms(nn.Linear(2, 2), "rmsnorm", where="*")


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.norm.register_forward_hook(lambda module, inputs, output: None)


REFUSALS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "another formula": (lambda: model(EpsOutsideRMSNorm(DIM)), "no known formula"),
    "another variance": (lambda: model(UnbiasedLayerNorm(DIM)), "no known formula"),
    "two inputs": (lambda: model(RMSNormGated(DIM)), "takes hidden_states, gate"),
    "several axes": (lambda: model(nn.LayerNorm((3, DIM))), "over 2 axes"),
    "batch": (lambda: model(nn.BatchNorm1d(DIM)), "not a LayerNorm or RMSNorm of each token"),
    "groups": (lambda: model(nn.GroupNorm(2, DIM)), "not a LayerNorm or RMSNorm of each token"),
    "hooks": (Hooked, "hooks"),
    "itself": (lambda: nn.LayerNorm(DIM), "the model itself is a norm"),
    "fast path": (lambda: nn.TransformerEncoderLayer(DIM, 2, batch_first=True), "fast path"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_be_replaced_is_refused_with_the_reason(what: str) -> None:
    make, reason = REFUSALS[what]
    target = make()
    before = [type(module) for module in target.modules()]
    report = swap_norms(target, "rmsnorm")
    assert not report.replaced and report.refused
    assert all(reason in why for _, why in report.refused)
    assert [type(module) for module in target.modules()] == before


def test_shared_norms_and_shared_weights_are_refused_by_name() -> None:
    norm, tied = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
    tied.bias = norm.bias
    shared = nn.Sequential(norm, norm)
    assert swap_norms(shared, "rmsnorm").refused == (("0", "shared with 1"), ("1", "shared with 0"))
    assert swap_norms(model(norm, tied), "rmsnorm").refused == (("1", "shared with 2"), ("2", "shared with 1"))


def test_an_error_leaves_the_model_alone() -> None:
    new = model(nn.LayerNorm(DIM), nn.LayerNorm(6))
    with pytest.raises(UserError, match="4 heads do not divide the width 6"):
        swap_norms(new, "seednorm:heads=4")
    assert isinstance(new[1], nn.LayerNorm)
    with pytest.raises(UserError, match="did you mean rmsnorm"):
        swap_norms(new, "rmsnrm")


def test_the_report_is_a_table() -> None:
    new = model(nn.LayerNorm(DIM), build_norm("rmsnorm", DIM), nn.BatchNorm1d(DIM))
    table = str(swap_norms(new, "rmsnorm"))
    assert table.splitlines() == [
        "norm  outcome   detail",
        "1     replaced  LayerNorm -> RMSNorm, function changed: the mean is no longer subtracted",
        "2     kept      is rmsnorm already",
        "3     refused   not a LayerNorm or RMSNorm of each token",
    ]


# --- models that run with the new norms, and those that do not


def test_norms_whose_weight_the_model_reads_are_refused() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "vocab_size": 48}
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)).eval()
    tokens = torch.arange(3, 12)[None]
    expected, state = model(tokens).logits, torch.random.get_rng_state()
    report = swap_norms(model, "rmsnorm")
    assert [one.name for one in report.replaced] == ["backbone.norm_f"] and report.function_kept
    assert {name for name, _ in report.refused} == {"backbone.layers.0.norm", "backbone.layers.1.norm"}
    assert all("the model fails with the new norm: AttributeError" in reason for _, reason in report.refused)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_model_runs_on_the_inputs_that_are_given() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.read = nn.LayerNorm(8), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) * self.read.weight + self.read(x)

    report = swap_norms(Reads(), "seednorm", inputs={"x": torch.randn(2, 8)})
    assert [one.name for one in report.replaced] == ["norm"] and [name for name, _ in report.refused] == ["read"]


def test_the_output_stays_contiguous_where_it_was() -> None:
    x = torch.randn(2, 8, 3).transpose(1, 2)
    for norm, contiguous in ((nn.LayerNorm(8), True), (nn.RMSNorm(8), False)):
        model = nn.Sequential(norm)
        assert model(x).is_contiguous() or not contiguous
        swap_norms(model, "rmsnorm")
        swap_norms(model, "seednorm")
        assert model(x).is_contiguous() or not contiguous
        if contiguous:
            model(x).view(-1)


@pytest.mark.parametrize("kind", ["Wan", "Transformer2DModel"])
def test_swapped_models_of_diffusers_load(kind: str, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    if kind == "Wan":
        model = diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
            text_dim=8, freq_dim=16, ffn_dim=16, num_layers=1, cross_attn_norm=True,
        )  # fmt: skip
    else:
        model = diffusers.Transformer2DModel(
            num_attention_heads=2, attention_head_dim=16, in_channels=32, num_layers=1, cross_attention_dim=8
        )
    assert swap_norms(model, "rmsnorm").replaced
    for dtype in (torch.float32, torch.bfloat16):
        model.save_pretrained(tmp_path)
        loaded = siamesenorm.from_pretrained(tmp_path, torch_dtype=dtype)
        assert type(loaded) is type(model)
        for name, value in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], value.to(loaded.state_dict()[name].dtype)), name
    kept = [value.dtype for name, value in loaded.state_dict().items() if "scale_shift_table" in name]
    assert set(kept) <= {torch.float32} and torch.bfloat16 in {value.dtype for value in loaded.state_dict().values()}
