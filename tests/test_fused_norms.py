"""The fused operator of norms: its plain body against the formulas, its contract with PyTorch, its code for Hopper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from norm_operator_cases import CASES, gradients, tokens, trained
from siamesenorm.errors import UserError
from siamesenorm.kernels import launch
from siamesenorm.kernels import operators as operator
from siamesenorm.kernels.norm_plain import ACTIVATIONS, Form, Weights
from siamesenorm.kernels.operators import normalise, normalise_backward
from siamesenorm.norms import norm as norms_norm
from siamesenorm.norms import seed_norm

# PyTorch's compiler asks every tensor for its gradient and hides the warning, which "error" brings back.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")

EACH = pytest.mark.parametrize("case", CASES)
DIM = 12


def run_both(case: str, x: Tensor, **options: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return value and gradients of a norm by the operator and by its formula."""
    norm = trained(case, x.shape[-1], **options)
    norm.kernels = "fused"
    fused = gradients(norm, x)
    norm.kernels = "plain"
    return fused, gradients(norm, x)


# --- the plain body is the formula


@EACH
@pytest.mark.parametrize("affine", [True, False])
def test_the_operator_is_the_formula(case: str, affine: bool) -> None:
    fused, plain = run_both(case, tokens(2, 3, DIM), affine=affine)
    torch.testing.assert_close(fused, plain, rtol=1e-12, atol=1e-12)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_are_the_same_bits(case: str, dtype: torch.dtype) -> None:
    """In the dtypes of training, with fp32 weights; LayerNorm's formula is PyTorch's own and rounds its own way."""
    norm = trained(case, DIM, dtype=torch.float32)
    x = tokens(5, DIM, dtype=dtype)
    plain = norm(x)
    norm.kernels = "fused"
    fused = norm(x)
    assert fused.dtype == dtype
    if case.startswith("layernorm"):
        torch.testing.assert_close(fused, plain)
    else:
        assert torch.equal(fused, plain)


def test_every_activation_is_known() -> None:
    assert list(ACTIVATIONS) == list(seed_norm.ACTIVATIONS)


def test_a_head_for_every_channel_has_a_factor_too() -> None:
    fused, plain = run_both(f"seednorm:heads={DIM},scale=1/d", tokens(4, DIM))
    torch.testing.assert_close(fused, plain, rtol=1e-12, atol=1e-12)


def test_weights_at_zero() -> None:
    """zero_() makes the operator 0, and lets a gradient through to what has to move first."""
    norm, x = trained("seednorm:heads=4", DIM), tokens(3, DIM)
    norm.zero_()
    norm.kernels = "fused"
    value, grad_x, grad_alpha, grad_beta, grad_gamma = gradients(norm, x)
    assert not value.any() and not grad_x.any() and not grad_alpha.any()
    assert grad_beta.all() and grad_gamma.all()


# --- the contract with PyTorch


def arguments(centred: bool, **absent: None) -> dict[str, Any]:
    """Return arguments of the operator, of 5 tokens, in fp64; every weight learns."""
    weights = {name: tokens(DIM, seed=i) for i, name in enumerate(Weights._fields, start=3)}
    form = Form(offset=0.3, heads=3, dot_scale=0.5, activation="tanh", eps=1e-3, centred=centred)
    return {"x": tokens(1, 5, DIM), **weights, **form._asdict(), **absent}


VARIANTS = pytest.mark.parametrize(
    "chosen",
    [
        arguments(centred=False),
        arguments(centred=True),
        arguments(centred=False, alpha=None, bias=None),
        arguments(centred=True, alpha=None, beta=None),
        {**arguments(centred=False), "heads": DIM},
    ],
    ids=["all", "all, centred", "no alpha", "layernorm", "a head for every channel"],
)


@pytest.mark.every_nth(2)
@VARIANTS
def test_gradients_of_every_input(chosen: dict[str, Any]) -> None:
    def value(*inputs: Tensor) -> Tensor:
        y: Tensor = normalise(**{**chosen, **dict(zip(learned, inputs, strict=True))})[0]
        return y

    learned = [name for name, part in chosen.items() if isinstance(part, Tensor)]
    inputs = tuple(chosen[name] for name in learned)
    assert torch.autograd.gradcheck(value, inputs)
    assert torch.autograd.gradgradcheck(value, inputs)


@pytest.mark.every_nth(2)
@VARIANTS
def test_the_operators_keep_pytorchs_contract(chosen: dict[str, Any]) -> None:
    torch.library.opcheck(normalise, tuple(chosen.values()))
    given = [part.detach() if isinstance(part, Tensor) else part for part in chosen.values()]
    y, statistics, dots = normalise(*given)
    torch.library.opcheck(normalise_backward, (torch.ones_like(y), given[0], statistics, dots, *given[1:]))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.every_nth(4)
@EACH
def test_a_compiled_graph_holds_the_operator(case: str) -> None:
    norm, x = trained(case, DIM, dtype=torch.float32), tokens(3, DIM, dtype=torch.float32)
    norm.kernels = "fused"
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, x), gradients(norm, x), rtol=0, atol=0)


def test_what_is_kept_for_the_backward_pass() -> None:
    """Besides the weights: x, one number a token, and one for each of its heads."""
    norm, x = trained("seednorm:heads=4", DIM, dtype=torch.float32), tokens(7, DIM, dtype=torch.bfloat16)
    norm.kernels = "fused"
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda part: kept.append(part) or part, lambda part: part):
        norm(x)
    held = {part.data_ptr() for part in (x, *norm.parameters())}
    assert sorted(part.numel() for part in kept if part.data_ptr() not in held) == [7, 7 * 4]
    assert len(kept) == 3 + 3


def test_no_tokens_and_turned_tokens() -> None:
    norm = trained("seednorm:heads=4", DIM)
    norm.kernels = "fused"
    assert norm(tokens(0, 3, DIM)).shape == (0, 3, DIM)
    x = tokens(DIM, 3)
    torch.testing.assert_close(norm(x.mT), norm(x.mT.contiguous()), rtol=0, atol=0)
    with torch.device("meta"):
        assert norm.to("meta")(torch.empty(2, 3, DIM)).shape == (2, 3, DIM)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"beta": torch.ones(3)}, r"beta is \[3\]"),
        ({"beta": None}, "alpha"),
        ({"heads": 5}, "5 heads"),
        ({"activation": "relu"}, "relu"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        normalise(**{**arguments(centred=False), **wrong})


# --- who takes the operator


def took_operator(norm: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether a norm leaves x to the operator."""
    taken: list[Tensor] = []
    with monkeypatch.context() as patch:
        patch.setattr(type(norm), "fused", lambda _, rows: taken.append(rows) or rows)
        norm(x)
    return bool(taken)


def test_auto_is_the_formula_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not took_operator(trained("seednorm", DIM), tokens(3, DIM), monkeypatch)


def pretend_kernels(monkeypatch: pytest.MonkeyPatch, smallest: int = 0) -> None:
    """Let there be kernels for every tensor of so many bytes."""
    monkeypatch.setattr(norms_norm, "has_norm_kernels", lambda _: True)
    monkeypatch.setattr(launch, "SMALLEST_FUSED_BYTES", smallest)


def test_auto_is_the_formula_for_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where launching takes the host longer than the formula; the operator is used on request."""
    norm, x = trained("rmsnorm", DIM), tokens(3, DIM)
    pretend_kernels(monkeypatch, smallest=x.nbytes + 1)
    assert not took_operator(norm, x, monkeypatch)
    norm.kernels = "fused"
    assert took_operator(norm, x, monkeypatch)
    pretend_kernels(monkeypatch, smallest=x.nbytes)
    norm.kernels = "auto"
    assert took_operator(norm, x, monkeypatch)


def test_auto_is_the_operator_where_there_is_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_kernels(monkeypatch)
    norm, x = trained("seednorm:dropout=0.5", DIM), tokens(3, DIM)
    assert not took_operator(norm, x, monkeypatch), "dropout"
    assert took_operator(norm.eval(), x, monkeypatch)
    assert took_operator(norm.eval(), nn.Parameter(x.detach()), monkeypatch)
    norm.kernels = "plain"
    assert not took_operator(norm, x, monkeypatch)
    norm.kernels = "auto"
    assert not torch.func.vmap(lambda row: torch.tensor(took_operator(norm, row, monkeypatch)))(x).any()
    assert not took_operator(trained("scalenorm", DIM), x, monkeypatch), "no fused form"


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own use
@pytest.mark.parametrize("frozen", [True, False])
def test_forward_mode_keeps_the_tangent(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator would lose it, in silence if nothing asks for gradients."""
    pretend_kernels(monkeypatch)
    norm, x = trained("seednorm", DIM).requires_grad_(not frozen), tokens(3, DIM).detach()

    def tangent(kernels: str) -> Tensor:
        norm.kernels = kernels
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(norm(forward_ad.make_dual(x, x.sin()))).tangent

    torch.testing.assert_close(tangent("auto"), tangent("plain"), rtol=0, atol=0)
    with pytest.raises(UserError):
        tangent("fused")
    with pytest.raises(UserError):
        torch.func.vmap(norm)(x)


def test_channels_first_takes_the_operator_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_kernels(monkeypatch)
    norm, x = seed_norm.SeeDNorm(DIM, axis=1), tokens(2, DIM, 5, dtype=torch.float32)
    assert not took_operator(norm, x, monkeypatch)
    expected = norm(x)
    norm.kernels = "fused"
    torch.testing.assert_close(norm(x), expected)


def test_a_compiled_norm_takes_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_kernels(monkeypatch)
    graphs: list[torch.fx.GraphModule] = []
    norm = trained("seednorm", DIM, dtype=torch.float32)
    compiled = torch.compile(norm, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    compiled(tokens(3, DIM, dtype=torch.float32))
    assert "rsqrt" in graphs[0].code and "siamesenorm" not in graphs[0].code


def test_the_operator_in_vain_is_refused() -> None:
    norm = trained("seednorm:dropout=0.5", DIM)
    norm.kernels = "fused"
    with pytest.raises(UserError):
        norm(tokens(3, DIM))
    norm.eval()(tokens(3, DIM))


def test_kernels_are_for_gpus_and_rows_that_fit() -> None:
    assert not operator.has_norm_kernels(torch.empty(2, 8))
    assert operator.tile_length(768, 16) == 1024 and operator.tile_length(768, 768) == 1024
    assert operator.tile_length(8192, 16) == 8192 and operator.tile_length(10_000, 1) == operator.LONGEST_ROW
