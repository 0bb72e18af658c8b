"""What the papers prove or prescribe about single operators, the conditioned forms, and the refusals."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from reference_norms import apply_reference
from siamesenorm.errors import UserError
from siamesenorm.norms import (
    AdaLN,
    AdaSeeDNorm,
    DyT,
    NormSpec,
    RMSNorm,
    Role,
    SeeDNorm,
    build_norm,
    declared_parameters,
)
from siamesenorm.sublayers.sublayer import Context, Modulated

DIM = 12


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# SeeDNorm (arXiv 2510.22777)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", ["", ":heads=4", ":activation=hardtanh", ":elementwise=true", ":scale=1/d"])
def test_at_beta_zero_seednorm_is_rmsnorm_exactly(options: str, dtype: torch.dtype) -> None:
    seed, rms = build_norm(f"seednorm{options}", DIM), RMSNorm(DIM)
    seed.gamma.data = rms.gain.data = draw(0, DIM).float()
    x = (5 * draw(1, 4, DIM)).to(dtype)
    assert torch.equal(seed(x), rms(x))


def dot_product_variance(dim: int, heads: int) -> float:
    """Var of x . beta over tokens, heads and draws of beta, all of unit variance."""
    norm = SeeDNorm(dim, heads=heads).double()
    values = []
    for seed in range(64):
        norm.beta.data = draw(seed, dim)
        values.append(norm.dot_products(draw(1000 + seed, 64, dim)))
    return torch.cat(values).square().mean().item()


def test_theorem_3_2_the_variance_of_the_dot_product_grows_as_the_width_and_falls_with_heads() -> None:
    for dim, heads in ((32, 1), (256, 1), (256, 8), (256, 64)):
        assert dot_product_variance(dim, heads) == pytest.approx(dim / heads, rel=0.1)
    assert SeeDNorm(DIM, scale="1/d").dot_scale == 1 / DIM


def jacobian(norm: nn.Module, x: Tensor) -> Tensor:
    return torch.autograd.functional.jacobian(norm, x)


@pytest.mark.parametrize("heads", [1, 3])
def test_the_gradient_at_kx_is_a_kth_while_the_dynamic_term_is_saturated(heads: int) -> None:
    norm = SeeDNorm(DIM, heads=heads, eps=0.0).double()
    norm.beta.data, norm.alpha.data, norm.gamma.data = draw(2, DIM), draw(3, DIM), draw(4, DIM)
    x = 200 * draw(5, DIM)
    assert (norm.dot_products(x).abs() > 20).all()  # tanh is 1 to the last bit, its derivative below 1e-16
    torch.testing.assert_close(jacobian(norm, 7 * x), jacobian(norm, x) / 7, rtol=1e-10, atol=1e-14)
    near = x / 4000
    assert not torch.allclose(jacobian(norm, 7 * near), jacobian(norm, near) / 7, rtol=1e-2)


def test_proposition_6_1_dyt_and_rmsnorm_obey_one_differential_equation_at_constant_norm() -> None:
    """dy_i/dx_i = (1 - y_i^2 / d) / RMS: RMSNorm at any x; DyT(g sqrt(d), a 1 / (sqrt(d) RMS)) if RMS is held fixed."""
    x = 3 * draw(6, DIM)
    rms = x.square().mean().sqrt()
    rmsnorm = RMSNorm(DIM, eps=0.0).double()
    dyt = DyT(DIM, bias=False).double()
    dyt.gain.data.fill_(math.sqrt(DIM))
    dyt.alpha.data.fill_(1 / (math.sqrt(DIM) * rms.item()))
    for norm in (rmsnorm, dyt):
        expected = (1 - norm(x).square() / DIM) / rms
        torch.testing.assert_close(jacobian(norm, x).diagonal(), expected, rtol=1e-12, atol=1e-14)


def test_dropout_drops_and_rescales_the_dynamic_coefficient_only() -> None:
    norm = SeeDNorm(4096, dropout=0.25, eps=0.0)
    nn.init.constant_(norm.beta, 1e-4)
    x = torch.ones(4096)
    dynamic = math.tanh(4096 * 1e-4)
    torch.testing.assert_close(norm.eval()(x), torch.full_like(x, 1 + dynamic))
    torch.manual_seed(0)
    coefficients = norm.train()(x) - 1
    dropped = coefficients.abs() < 1e-6
    assert 0.2 < dropped.float().mean() < 0.3
    torch.testing.assert_close(coefficients[~dropped], torch.full_like(coefficients[~dropped], dynamic / 0.75))


def test_vision_recipe_of_seednorm() -> None:
    def build(text: str, dim: int = 768) -> SeeDNorm:
        norm = NormSpec.parse(text).build(dim, role=Role("attention", "vision"))
        assert isinstance(norm, SeeDNorm)
        return norm

    assert (build("seednorm").heads, build("seednorm").scale, build("seednorm").note) == (16, "1/d", "")
    assert (build("seednorm:heads=1,scale=none").heads, build("seednorm:heads=1,scale=none").scale) == (1, "none")
    assert build("seednorm", 24).heads == 8
    assert build("seednorm", 24).note == "SeeDNorm has 8 heads: 16 do not divide width 24"
    assert build("seednorm:without=beta").heads == build("seednorm:elementwise=true").heads == 1
    assert build("seednorm:dropout=0.1").dropout == 0.1
    language = NormSpec.parse("seednorm").build(768, role=Role("attention", "language"))
    assert language.settings() == SeeDNorm(768).settings()
    assert (language.settings()["heads"], language.settings()["scale"]) == (1, "none")


# DyT (arXiv 2503.10622)


@pytest.mark.parametrize(
    ("dim", "attention", "other"),
    [(4096, 0.8, 0.2), (5120, 0.6, 0.15), (8192, 0.2, 0.05), (128, 0.8, 0.2), (4608, 0.7, 0.175), (16384, 0.2, 0.05)],
)
def test_language_recipe_of_dyt(dim: int, attention: float, other: float) -> None:
    for kind, expected in (("attention", attention), ("mlp", other), ("final", other)):
        norm = NormSpec.parse("dyt").build(dim, role=Role(kind, "language"))
        assert norm.alpha.item() == pytest.approx(expected)
        assert norm.bias is None and norm.scales_embedding
        assert bool(norm.note) == (dim not in (4096, 5120, 8192))
        assert not norm.note or str(dim) in norm.note


def test_vision_recipe_of_dyt_and_explicit_options() -> None:
    vision = NormSpec.parse("dyt").build(DIM, role=Role("attention", "vision"))
    assert vision.alpha.item() == 0.5 and vision.bias is not None
    for given in (0.5, 2.0):
        explicit = NormSpec.parse(f"dyt:alpha_initial={given},bias=true").build(DIM, role=Role("attention", "language"))
        assert explicit.alpha.item() == given and explicit.bias is not None and explicit.note == ""
    assert DyT(DIM).alpha.item() == 0.5 and DyT(DIM).bias is not None
    assert not any(norm.scales_embedding for norm in (RMSNorm(DIM), SeeDNorm(DIM)))


# Refusals


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seednrm", "'seednrm'"),
        ("seednorm:head=4", "'head'"),
        ("seednorm:heads=5", "5"),
        ("seednorm:heads=0", "0"),
        ("seednorm:heads=2.5", "2.5"),
        ("seednorm:heads=many", "many"),
        ("seednorm:activation=tanhh", "tanhh"),
        ("seednorm:without=gama", "gama"),
        ("seednorm:scale=1/sqrt", "1/sqrt"),
        ("seednorm:dropout=1", "1.0"),
        ("seednorm:scalar_alpha=perhaps", "perhaps"),
        ("seednorm:elementwise=true,heads=4", "elementwise"),
        ("seednorm:without=beta,scale=1/d", "without=beta"),
        ("seednorm:without=beta,elementwise=true", "elementwise"),
        ("seednorm:without=alpha,scalar_alpha=true", "scalar_alpha"),
        ("dyt:alpha_initial=large", "large"),
        ("dyt:alpha_initial=nan", "is nan"),
        ("seednorm:alpha_initial=inf", "is inf"),
        ("dyt:bias=2", "2"),
        ("scalenorm:eps=-1", "-1"),
        ("rmsnorm:eps=nan", "is nan"),
        ("layernorm:eps=tiny", "tiny"),
    ],
)
def test_bad_input_is_refused_with_value_and_remedy(text: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        build_norm(text, DIM)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_options_are_checked_in_python_too() -> None:
    with pytest.raises(UserError, match="tiny"):
        build_norm("rmsnorm", DIM, eps="tiny")
    assert build_norm("rmsnorm:eps=1e-3", DIM, eps=1).settings()["eps"] == 1.0
    with pytest.raises(UserError, match="dim is 0"):
        RMSNorm(0)


# Conditioned forms (arXiv 2212.09748)

CONDITION = 5


def conditioned(module: nn.Module) -> nn.Module:
    """Move every parameter away from its initial value, in fp64."""
    for seed, parameter in enumerate(module.double().parameters()):
        parameter.data += 0.4 * draw(seed, *parameter.shape)
    return module


def modulation_parts(module: nn.Module, c: Tensor) -> list[Tensor]:
    """The specification's projection, written out: W (c / (1 + exp(-c))) + b, cut into equal parts."""
    weight, bias = module.modulation.weight.detach(), module.modulation.bias.detach()
    projected = (weight * (c / (1 + torch.exp(-c)))).sum(-1) + bias
    return list(projected.reshape(-1, DIM))


def test_adaseednorm_is_its_formula() -> None:
    norm = conditioned(AdaSeeDNorm(DIM, CONDITION, heads=3))
    x, c = draw(10, 2, 4, DIM), draw(11, 2, CONDITION)
    y = norm(x, c)
    assert {name for name, _ in norm.norm.named_parameters()} == {"alpha", "beta"}
    for sample in range(2):
        shift, scale = modulation_parts(norm, c[sample])
        inner = apply_reference("seednorm", x[sample], dict(norm.norm.named_parameters()), norm.norm.settings())
        torch.testing.assert_close(y[sample], inner * (1 + scale) + shift, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm", "seednorm:heads=4", "dyt"])
def test_adaln_starts_as_its_norm(name: str) -> None:
    x, c = draw(12, 2, 4, DIM), draw(13, 2, CONDITION)
    assert torch.equal(AdaLN(DIM, CONDITION, name).double()(x, c), build_norm(name, DIM, affine=False).double()(x))


class Mixer(nn.Module):
    """A sublayer that mixes tokens, takes a mask, and may report a loss."""

    def __init__(self, loss: bool = False) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(DIM, DIM), loss

    def forward(self, h: Tensor, context: Context) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        output = self.linear(h * context.mask).cumsum(1)
        return (output, {"balance": h.mean()}) if self.loss else output


def test_modulated_is_its_formula() -> None:
    module = conditioned(Modulated(Mixer(), DIM, CONDITION))
    h, c, mask = draw(14, 2, 4, DIM), draw(15, 2, CONDITION), draw(16, 4, 1)
    y = module(h, Context(mask=mask, condition=c))
    for sample in range(2):
        shift, scale, gate = modulation_parts(module, c[sample])
        inner = module.sublayer((h[sample] * (1 + scale) + shift).unsqueeze(0), Context(mask=mask))[0]
        torch.testing.assert_close(y[sample], gate * inner, rtol=1e-12, atol=1e-12)


def test_modulated_hands_losses_on_and_takes_a_condition_for_each_token() -> None:
    module = conditioned(Modulated(Mixer(loss=True), DIM, CONDITION))
    h, c, mask = draw(17, 2, 4, DIM), draw(18, 2, CONDITION), torch.ones(4, 1, dtype=torch.float64)
    y, losses = module(h, Context(mask=mask, condition=c))
    assert losses.keys() == {"balance"}
    each, _ = module(h, Context(mask=mask, condition=c.unsqueeze(1).expand(2, 4, CONDITION)))
    torch.testing.assert_close(each, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modulated_starts_at_exactly_zero_and_learns(dtype: torch.dtype) -> None:
    module = Modulated(Mixer(), DIM, CONDITION).to(dtype)
    h, c, mask = draw(19, 2, 4, DIM).to(dtype), draw(20, 2, CONDITION).to(dtype), torch.ones(4, 1, dtype=dtype)
    y = module(h, Context(mask=mask, condition=c))
    assert y.dtype == dtype and not y.any()
    y.float().sum().backward()
    shift, scale, gate = module.modulation.weight.grad.chunk(3)
    assert gate.any() and not shift.any() and not scale.any()
    declarations = {name: (d.initial, d.decay) for name, _, d in declared_parameters(module)}
    assert declarations == {"modulation.weight": (0.0, True), "modulation.bias": (0.0, False)}


def test_modulated_norm_is_adaseednorm() -> None:
    ada = conditioned(AdaSeeDNorm(DIM, CONDITION))

    class Unchanged(nn.Module):
        def forward(self, h: Tensor, context: Context) -> Tensor:
            return h

    module = Modulated(Unchanged(), DIM, CONDITION).double()
    module.modulation.weight.data[: 2 * DIM] = ada.modulation.weight.data
    module.modulation.bias.data[: 2 * DIM] = ada.modulation.bias.data
    module.modulation.bias.data[2 * DIM :] = 1.0  # gate
    x, c = draw(21, 2, 4, DIM), draw(22, 2, CONDITION)
    torch.testing.assert_close(module(ada.norm(x), Context(condition=c)), ada(x, c), rtol=1e-14, atol=1e-14)
