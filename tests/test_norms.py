"""Laws of every registered norm, by parametrisation: a norm added to the registry is tested without touching this file.

VARIANTS adds operators with options; a registered name needs no entry there. What the papers prove is in
`test_norm_facts.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from reference_norms import apply_reference
from siamesenorm.errors import UserError
from siamesenorm.norms import NORMS, Norm, NormSpec, available_norms, build_norm, declared_parameters
from siamesenorm.norms.parameters import assign
from training_runs import tiny_run, write_data

VARIANTS = (
    "layernorm:bias=false",
    "rmsnorm:offset=1.0",
    "dyt:alpha_initial=0.8,bias=false",
    "seednorm:heads=4",
    "seednorm:heads=4,scale=1/d",
    "seednorm:activation=sigmoid",
    "seednorm:activation=hardtanh,heads=3",
    "seednorm:activation=gelu",
    "seednorm:activation=silu",
    "seednorm:alpha_initial=0.1",
    "seednorm:alpha_initial=10",
    "seednorm:scalar_alpha=true,heads=2",
    "seednorm:elementwise=true",
    "seednorm:without=alpha,heads=4",
    "seednorm:without=alpha,activation=sigmoid",
    "seednorm:without=beta",
    "seednorm:without=beta,activation=sigmoid",
    "seednorm:without=gamma,heads=2",
    "seednorm:dropout=0.2",
    "seednorm:offset=1.0,heads=2",
)
CASES = (*available_norms(), *VARIANTS)
EVERY_CASE = pytest.mark.parametrize("case", CASES)
DIM = 12


def tokens(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return 2 * torch.randn(*shape, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


@torch.no_grad()
def trained(norm: Norm, seed: int = 0) -> Norm:
    """Move every parameter away from its initial value."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in norm.parameters():
        parameter += 0.4 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator).to(parameter.dtype)
    return norm


def build(case: str, *, affine: bool = True, axis: int = -1, dtype: torch.dtype = torch.float64) -> Norm:
    return build_norm(case, DIM, affine=affine, axis=axis).to(dtype).eval()


def reference(case: str, norm: Norm, x: Tensor) -> Tensor:
    return apply_reference(NormSpec.parse(case).name, x, dict(norm.named_parameters()), norm.settings())


@EVERY_CASE
@pytest.mark.parametrize("affine", [True, False])
def test_the_formula_is_the_reference(case: str, affine: bool) -> None:
    norm, x = build(case, affine=affine), tokens(1, 2, 3)
    torch.testing.assert_close(norm(x), reference(case, norm, x), rtol=1e-12, atol=1e-12)
    trained(norm)
    torch.testing.assert_close(norm(x), reference(case, norm, x), rtol=1e-12, atol=1e-12)


@EVERY_CASE
def test_gradients_are_those_of_the_formula(case: str) -> None:
    norm, x = trained(build(case)), tokens(2, 2).requires_grad_()
    names = [name for name, _ in norm.named_parameters()]

    def value(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(norm, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(value, (x, *norm.parameters()))


@EVERY_CASE
def test_scale_invariance_is_as_declared(case: str) -> None:
    norm, x = build(case), tokens(3, 4)
    for operator in (norm, trained(norm)) if norm.scale_invariant else (trained(norm),):
        for factor in (0.5, 3.0):
            same = torch.allclose(operator(factor * x), operator(x), rtol=1e-4, atol=1e-5)
            assert same == norm.scale_invariant


@EVERY_CASE
def test_idempotence_is_as_declared(case: str) -> None:
    norm, x = build(case), tokens(4, 4)
    once = norm(x)
    assert torch.allclose(norm(once), once, rtol=1e-4, atol=1e-5) == norm.idempotent


@EVERY_CASE
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_zeroed_norms_return_zero(case: str, dtype: torch.dtype) -> None:
    norm = trained(build(case, dtype=dtype))
    assert norm(tokens(5, 8).to(dtype)).any()
    norm.zero_()
    assert not norm(1e3 * tokens(5, 8).to(dtype)).any()


@EVERY_CASE
def test_without_gain_there_is_nothing_to_zero(case: str) -> None:
    norm = build(case, affine=False)
    assert not {"gain", "bias", "gamma"} & {name for name, _ in norm.named_parameters()}
    if "without=gamma" in case:
        norm.zero_()
        assert not norm(tokens(5, 8)).any()
    else:
        with pytest.raises(ValueError, match="affine=False"):
            norm.zero_()


@EVERY_CASE
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_statistics_and_gains_are_wide_and_the_result_is_rounded_once(
    case: str, dtype: torch.dtype, stored: torch.dtype
) -> None:
    norm = trained(build(case, dtype=stored))
    x = (tokens(6, 3) * torch.tensor([[1.0], [0.02], [300.0]])).to(dtype)  # 300^2 is beyond fp16
    y, expected = norm(x), reference(case, norm, x)
    assert y.dtype == dtype
    one_rounding = torch.finfo(dtype).eps / 2 * expected.abs()
    float32_error = 2e-4 * expected.abs().amax(-1, keepdim=True)
    assert ((y.double() - expected).abs() <= 1.01 * one_rounding + float32_error).all()


@EVERY_CASE
def test_channels_first_is_channels_last_permuted(case: str) -> None:
    last, first = trained(build(case)), trained(build(case, axis=1))
    images = tokens(7, 2, 3, 4)
    torch.testing.assert_close(first(images.movedim(-1, 1)).movedim(1, -1), last(images), rtol=0, atol=0)


@EVERY_CASE
def test_leading_shape_is_free(case: str) -> None:
    norm, x = trained(build(case)), tokens(8, 5)
    torch.testing.assert_close(norm(x[2]), norm(x)[2])
    assert norm(x[:0]).shape == (0, DIM)
    assert norm(torch.zeros_like(x)).isfinite().all()


@EVERY_CASE
def test_wrong_width_is_refused(case: str) -> None:
    with pytest.raises(ValueError, match=str(DIM)):
        build(case)(torch.ones(3, 1, dtype=torch.float64))


@EVERY_CASE
def test_state_dict_round_trip(case: str) -> None:
    norm, copy, x = trained(build(case)), build(case), tokens(9, 4)
    copy.load_state_dict(norm.state_dict())
    assert torch.equal(copy(x), norm(x))


@EVERY_CASE
@pytest.mark.parametrize("affine", [True, False])
def test_meta_construction_and_reset_is_direct_construction(case: str, affine: bool) -> None:
    with torch.device("meta"):
        norm = build_norm(case, DIM, affine=affine)
    norm.to_empty(device="cpu")
    for parameter in norm.parameters():
        parameter.data.fill_(torch.nan)
    norm.reset_parameters()
    expected = build_norm(case, DIM, affine=affine).state_dict()
    assert norm.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in norm.state_dict().items())


@EVERY_CASE
@pytest.mark.parametrize("affine", [True, False])
def test_every_parameter_is_declared_and_starts_as_declared(case: str, affine: bool) -> None:
    norm = build(case, affine=affine)
    declared = {name: (parameter, declaration) for name, parameter, declaration in declared_parameters(norm)}
    assert declared.keys() == dict(norm.named_parameters()).keys()
    for parameter, declaration in declared.values():
        assert torch.equal(parameter.detach(), torch.tensor(declaration.initial).to(parameter).expand_as(parameter))
        assert parameter.ndim == 1  # sharded training takes no 0-d parameters


INITIAL_AND_DECAY = {
    "layernorm": {"gain": (1.0, False), "bias": (0.0, False)},
    "rmsnorm": {"gain": (1.0, False)},
    "rmsnorm:offset=1.0": {"gain": (0.0, False)},
    "scalenorm": {"gain": (DIM**0.5, False)},
    "dyt": {"alpha": (0.5, False), "gain": (1.0, False), "bias": (0.0, False)},
    "seednorm": {"alpha": (1.0, True), "beta": (0.0, True), "gamma": (1.0, False)},
    "seednorm:alpha_initial=10": {"alpha": (10.0, True), "beta": (0.0, True), "gamma": (1.0, False)},
    "seednorm:without=alpha": {"beta": (0.0, True), "gamma": (1.0, False)},
    "seednorm:without=beta": {"alpha": (1.0, True), "gamma": (1.0, False)},
    "seednorm:without=gamma": {"alpha": (1.0, True), "beta": (0.0, True)},
}


@pytest.mark.parametrize("case", INITIAL_AND_DECAY)
def test_initial_values_and_decay_are_the_specification(case: str) -> None:
    declarations = {name: (d.initial, d.decay) for name, _, d in declared_parameters(build(case))}
    assert declarations == INITIAL_AND_DECAY[case]


@EVERY_CASE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_has_no_say(case: str, dtype: torch.dtype) -> None:
    norm, x = trained(build(case, dtype=torch.float32)), tokens(10, 4, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        inside = norm(x)
    assert inside.dtype == dtype
    assert torch.equal(inside, norm(x))


@pytest.mark.parametrize("case", NORMS)
def test_one_graph_compiles_and_agrees(case: str) -> None:
    torch.compiler.reset()
    norm = trained(build(case, dtype=torch.float32)).train()
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    plain_input, x = (tokens(11, 4, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    norm(plain_input).float().square().sum().backward()
    expected = {name: parameter.grad for name, parameter in norm.named_parameters()}
    norm.zero_grad()
    y = compiled(x)
    y.float().square().sum().backward()
    torch.testing.assert_close(y, norm(x))
    torch.testing.assert_close(x.grad, plain_input.grad)
    torch.testing.assert_close({name: parameter.grad for name, parameter in norm.named_parameters()}, expected)


@EVERY_CASE
def test_specifications_survive_text_and_json(case: str) -> None:
    specification = NormSpec.parse(case)
    assert NormSpec.parse(str(specification)) == specification
    assert NormSpec.from_json(specification.to_json()) == specification
    norm = specification.build(DIM)
    assert {**norm.settings(), **dict(specification.options)} == norm.settings()
    assert repr(norm).startswith(f"{type(norm).__name__}({DIM}")


@pytest.mark.parametrize("name", available_norms())
def test_every_registered_norm_has_a_reference(name: str) -> None:
    norm = build(name)
    assert reference(name, norm, tokens(12, 1)).shape == (1, DIM)


# --- specifications --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spelled", "usual"),
    [
        (NormSpec("rmsnorm", (("eps", 1),)), NormSpec.parse("rmsnorm:eps=1.0")),
        (NormSpec.parse("dyt:alpha_initial=1"), NormSpec.parse("dyt:alpha_initial=1.0")),
        (NormSpec.parse("seednorm: heads=4 , offset=1"), NormSpec("seednorm", (("offset", 1.0), ("heads", 4)))),
        (NormSpec("layernorm", (("eps", 1e-5), ("bias", True))), NormSpec("layernorm")),
        (NormSpec.parse("seednorm:heads=4").with_options(heads="auto", eps=1), NormSpec.parse("seednorm:eps=1")),
    ],
)
def test_equal_specifications_are_spelled_alike(spelled: NormSpec, usual: NormSpec) -> None:
    assert spelled == usual
    assert json.dumps(spelled.to_json()) == json.dumps(usual.to_json())


def test_a_specification_with_other_options_keeps_the_rest() -> None:
    assert NormSpec.parse("seednorm:heads=4,eps=1e-3").with_options(eps=0.5) == NormSpec.parse(
        "seednorm:heads=4,eps=0.5"
    )


def test_unknown_names_and_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(UserError, match="rmsnorm"):
        NormSpec("rmsnrom").build(8)
    with pytest.raises(UserError, match="offset"):
        NormSpec("rmsnorm", (("offest", 1.0),))
    with pytest.raises(UserError, match="heads"):
        NormSpec().with_options(heads=4)
    for name in ("rmsnorm", "seednorm"):
        with pytest.raises(UserError, match="nan"):
            build_norm(f"{name}:offset=nan", 8)


# --- what a run records ----------------------------------------------------------------------------------------------


def test_the_record_of_a_run_says_how_a_recipe_was_read(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")

    def notes(norm: str) -> list[str]:
        task = tiny_run(data, model={"norm": norm, "topology": "pre"}).task.build(seed=0)
        return task.describe(task.build_model(torch.device("meta")))["notes"]

    taken = "no published value at width 16, that of 4096 is taken"
    assert notes("dyt") == [f"DyT alpha {alpha} for {kind}: {taken}"
                            for alpha, kind in (("0.2", "final"), ("0.2", "mlp"), ("0.8", "attention"))]  # fmt: skip
    assert notes("dyt:alpha_initial=0.3") == notes("rmsnorm") == []


# --- sharded parameters ----------------------------------------------------------------------------------------------


@pytest.fixture
def second_of_four() -> Iterator[None]:
    """A process group in which this process is rank 1 of 4, without the others."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def test_assigning_fills_the_part_that_a_rank_holds(second_of_four: None) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (4,))
    whole = torch.arange(12.0).reshape(6, 2)
    for placement, part in ((Shard(0), whole[2:4]), (Shard(1), whole[:, 1:]), (Replicate(), whole)):
        empty = torch.full((6, 2), torch.nan)
        parameter = nn.Parameter(distribute_tensor(empty, mesh, [placement], src_data_rank=None))
        assign(parameter, whole.double())
        assert torch.equal(parameter.to_local(), part)
        assign(parameter, torch.tensor(3.0))
        assert torch.equal(parameter.to_local(), torch.full_like(part, 3.0))
    norm = build_norm("seednorm:alpha_initial=0.5", 6)
    for name, parameter in list(norm.named_parameters()):
        empty = torch.full(parameter.shape, torch.nan)
        setattr(norm, name, nn.Parameter(distribute_tensor(empty, mesh, [Shard(0)], src_data_rank=None)))
    norm.reset_parameters()
    assert {name: p.to_local().tolist() for name, p in norm.named_parameters()} == {
        "alpha": [0.5, 0.5], "beta": [0.0, 0.0], "gamma": [1.0, 1.0],
    }  # fmt: skip


def test_assigning_broadcasts_and_casts() -> None:
    parameter = nn.Parameter(torch.empty(3, 2, dtype=torch.bfloat16))
    assign(parameter, torch.tensor(0.25, dtype=torch.float64))
    assert parameter.requires_grad and torch.equal(parameter, torch.full_like(parameter, 0.25))


def test_sharding_is_imported_only_where_it_can_occur() -> None:
    program = "import sys, siamesenorm; siamesenorm.build_norm('rmsnorm', 8).reset_parameters(); " \
              "print('torch.distributed.tensor' in sys.modules)"  # fmt: skip
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
