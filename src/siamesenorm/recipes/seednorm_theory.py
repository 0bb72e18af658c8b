"""SeeDNorm's theory (arXiv 2510.22777): variance of the dynamic term, gradients at k x, DyT, and unbounded sigma."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from siamesenorm.comparison.figure_style import Figure
from siamesenorm.comparison.formatting import significant
from siamesenorm.comparison.report_parts import Column, Entry, RowGroup, Table
from siamesenorm.norms import DyT, Norm, SeeDNorm, build_norm
from siamesenorm.recipes.theory import Claim, TheoryLine, TheoryResult, draw_lines, plain_styles, slope

PAPER = "2510.22777"
WIDTHS = (64, 128, 256, 512, 1024, 2048)
HEADS = (1, 4, 16)
SCALES = tuple(2.0**power for power in range(11))
ACTIVATIONS = ("tanh", "sigmoid", "hardtanh", "gelu", "silu")
BOUNDED = ACTIVATIONS[:3]


def dynamic_variance(widths: Sequence[int] = WIDTHS, heads: Sequence[int] = HEADS, draws: int = 40) -> TheoryResult:
    """Measure the variance of the dot products x . beta of a head against the width D and the number of heads n.

    x and beta are standard normal and independent, 64 rows of x for each draw of beta, fp64; a third case gives x a
    component along beta, of one standard deviation in each element.
    """
    variances = {n: [_dot_variance(width, n, draws) for width in widths] for n in heads}
    aligned = [_dot_variance(width, 1, draws, aligned=True) for width in widths]
    names = {n: f"{n} head{'s' if n > 1 else ''}" for n in heads}
    curves = {**{names[n]: variances[n] for n in heads}, "1 head, aligned": aligned}
    slopes = {name: slope(widths, values) for name, values in curves.items()}
    in_heads = slope(heads, [variances[n][-1] for n in heads])
    table = _table(
        "Variance of x · β by width",
        (
            Column("Case", "", numeric=False),
            *(Column(f"D = {width}", "") for width in widths),
            Column("Exponent", "in D"),
        ),
        [[name, *(significant(v, 3) for v in values), f"{slopes[name]:.3f}"] for name, values in curves.items()],
    )
    claims = (
        Claim(
            text="Theorem 3.2: the variance of the dot product grows as the width, and falls as one over the heads.",
            holds=all(abs(slopes[names[n]] - 1) < 0.05 for n in heads) and abs(in_heads + 1) < 0.05,
            measured=", ".join(f"exponent in D {slopes[names[n]]:.3f} with {names[n]}" for n in heads)
            + f"; exponent in the heads {in_heads:.3f} at D = {widths[-1]}",
        ),
        Claim(
            text="This also holds where the inputs have a component along β, as a trained norm may have.",
            holds=abs(slopes["1 head, aligned"] - 1) < 0.05,
            measured=f"exponent in D {slopes['1 head, aligned']:.3f}; the theorem assumes that x and β are independent",
        ),
    )
    return _result(
        name="dynamic-variance",
        title="Variance of SeeDNorm's dynamic dot product",
        setting="Standard normal x and β in fp64, the dot products of `SeeDNorm` itself; aligned: x = z + u β, z and u "
        "standard normal, u one number a row.",
        record={"widths": list(widths), "variances": curves, "slopes": slopes, "slope_in_heads": in_heads},
        table=table,
        curves=curves,
        x=widths,
        labels=("width D", "variance of x · β"),
        claims=claims,
    )


def gradient_scaling(scales: Sequence[float] = SCALES, dim: int = 256) -> TheoryResult:
    """Measure the gradient with respect to x at k x, for a fixed gradient of the output, relative to k = 1.

    Also compares the gradient of SeeDNorm with its formula, for x of 32 rows in fp64 and eps = 0:

        dL/dx = (c * g - y mean(c * g * y)) / RMS(x) + beta sigma'(x . beta) sum(alpha * g * y)

    with y = x / RMS(x), g = dL/dN and c = sigma(x . beta) alpha + gamma.
    """
    norms = {
        "RMSNorm": build_norm("rmsnorm", dim, eps=0.0),
        "SeeDNorm, β = 0": _seednorm(dim, 0.0),
        "SeeDNorm": _seednorm(dim, 0.05),
        "DyT": DyT(dim),
    }
    x, upstream = _normal((32, dim), 0), _normal((32, dim), 1)
    norms = {name: norm.double() for name, norm in norms.items()}
    curves = {}
    for name, norm in norms.items():
        sizes = [float(_gradient(norm, k * x, upstream).norm()) for k in scales]
        curves[name] = [max(size / sizes[0], 1e-12) for size in sizes]
    tail = {name: slope(scales[-4:], values[-4:]) for name, values in curves.items()}
    slopes = 1 - torch.tanh(0.5 * scales[5] * x).square()  # the derivatives of DyT's elements, over their largest
    vanished = float((slopes < 0.01).double().mean())
    errors = {k: _formula_error(norms["SeeDNorm"], k * x, upstream) for k in (1.0, 32.0)}
    table = _table(
        "Gradient with respect to x at k x, relative to k = 1",
        (
            Column("Norm", "", numeric=False),
            *(Column(f"k = {k:g}", "") for k in scales[::2]),
            Column("Exponent", "in k"),
        ),
        [[name, *(f"{v:.3g}" for v in values[::2]), f"{tail[name]:.3f}"] for name, values in curves.items()],
    )
    claims = _scaling_claims(scales, curves, tail, vanished, max(errors.values()))
    return _result(
        name="gradient-scaling",
        title="Gradients at k x",
        setting=f"Normal rows of width {dim}, one fixed normal gradient of the output, fp64, ε = 0; β normal with "
        "standard deviation 0.05; DyT with a = 0.5.",
        record={
            "scales": list(scales),
            "relative": curves,
            "tail_slopes": tail,
            "formula_errors": list(errors.values()),
        },
        table=table,
        curves=curves,
        x=scales,
        labels=("factor k on the input", "gradient, relative"),
        claims=claims,
    )


def _scaling_claims(
    scales: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    tail: Mapping[str, float],
    vanished: float,
    error: float,
) -> tuple[Claim, ...]:
    """Return the claims on gradients at k x; the first two curves are of norms that are invariant to k."""
    exact = list(curves)[:2]
    return (
        Claim(
            text="RMSNorm's gradient at k x is 1/k of that at x, and so is SeeDNorm's while β = 0.",
            holds=all(abs(k * v - 1) < 1e-9 for n in exact for k, v in zip(scales, curves[n], strict=True)),
            measured="k times the gradient differs by at most "
            f"{max(abs(k * v - 1) for n in exact for k, v in zip(scales, curves[n], strict=True)):.0e}",
        ),
        Claim(
            text="With β not 0 SeeDNorm's gradient falls as 1/k for large k, where tanh is saturated.",
            holds=abs(tail["SeeDNorm"] + 1) < 0.05,
            measured=f"exponent {tail['SeeDNorm']:.3f} from k = {scales[-4]:g} to {scales[-1]:g}; at k = 2 it is "
            f"{2 * curves['SeeDNorm'][1]:.2f} times what 1/k gives",
        ),
        Claim(
            text="DyT's gradient does not adapt to the norm of x: it vanishes where tanh is saturated, and stays as it "
            "is where x is near 0.",
            holds=vanished > 0.8 and tail["DyT"] > -0.7,
            measured=f"exponent {tail['DyT']:.2f} in place of −1; at k = {scales[5]:g} the derivative of "
            f"{vanished:.0%} of the elements is below 1 % of the largest",
        ),
        Claim(
            text="The gradient of SeeDNorm is that of its formula.",
            holds=error < 1e-12,
            measured=f"relative difference {error:.0e}",
        ),
    )


def dyt_equivalence(dim: int = 64, factor: float = 4.0) -> TheoryResult:
    """Compare dN_i/dx_i of RMSNorm and of DyT with 1 - N_i^2 / D at constant norm (Proposition 6.1).

    At constant RMS r the element-wise derivative of RMSNorm is (1 - y^2 / D) / r. Read as a differential equation it
    has the solution y = sqrt(D) tanh(x / (r sqrt(D))): DyT with a = 1 / (r sqrt(D)) and gain sqrt(D). Rows of RMS r = 1
    in which one element takes every size; then the same rows times `factor`, with the same DyT.
    """
    shares = [place / 20 for place in range(-19, 20)]
    rows = torch.stack([_row(dim, share) for share in shares])
    dyt, rms = (
        DyT(dim, alpha_initial=1 / math.sqrt(dim), bias=False).double(),
        build_norm("rmsnorm", dim, eps=0.0).double(),
    )
    with torch.no_grad():
        assert dyt.gain is not None
        dyt.alpha.fill_(1 / math.sqrt(dim))
        dyt.gain.fill_(math.sqrt(dim))
    found: dict[str, tuple[list[float], list[float]]] = {}
    cases = (("RMSNorm", rms, 1.0), ("DyT", dyt, 1.0), ("RMSNorm, larger", rms, factor), ("DyT, larger", dyt, factor))
    for name, norm, scale in cases:
        values, derivatives = _own_derivatives(norm, scale * rows)
        found[name] = (values, [scale * d for d in derivatives])
    errors = {name: max(abs(d - (1 - v * v / dim)) for v, d in zip(*pair, strict=True)) for name, pair in found.items()}
    table = _table(
        "r dN/dx against the equation 1 − N² / D",
        (
            Column("Norm and rows", "", numeric=False),
            Column("Largest deviation", "from the equation, which is at most 1"),
        ),
        [[name, f"{error:.1e}"] for name, error in errors.items()],
    )
    claims = (
        Claim(
            text="At constant norm RMSNorm and DyT satisfy the same differential equation, element by element.",
            holds=max(errors["RMSNorm"], errors["DyT"]) < 1e-12,
            measured=f"deviation {errors['RMSNorm']:.0e} (RMSNorm) and {errors['DyT']:.0e} (DyT) in fp64",
        ),
        Claim(
            text=f"At {factor:g} times the norm RMSNorm still satisfies it, and DyT, whose a is fixed, no longer does.",
            holds=errors["RMSNorm, larger"] < 1e-12 < 0.1 < errors["DyT, larger"],
            measured=f"deviation {errors['RMSNorm, larger']:.0e} (RMSNorm) and {errors['DyT, larger']:.2f} (DyT)",
        ),
    )
    shown = [name for name in found if name != "RMSNorm, larger"]
    return _result(
        name="dyt-equivalence",
        title="DyT and RMSNorm at constant norm",
        setting=f"Rows of width {dim} and RMS r, one element of which takes sizes up to 95 % of the norm; derivatives "
        f"of the modules by autograd, fp64. Larger: the same rows times {factor:g}.",
        record={"dim": dim, "factor": factor, "deviations": errors, "curves": {n: list(p) for n, p in found.items()}},
        table=table,
        curves={name: found[name][1] for name in shown},
        x={name: [value / math.sqrt(dim) for value in found[name][0]] for name in shown},
        labels=("N(x) / √D", "r dN/dx"),
        scale="linear",
        heading="Element-wise derivative",
        claims=claims,
    )


def unbounded_activation(
    activations: Sequence[str] = ACTIVATIONS, scales: Sequence[float] = SCALES, dim: int = 256, depth: int = 48
) -> TheoryResult:
    """Measure what SeeDNorm returns at k x for bounded and unbounded sigma, and a residual stack of it.

    The RMS of N(k x), for 32 rows along beta, normal elements of beta of standard deviation 0.05, alpha = gamma = 1,
    fp64; then x <- x + N(x), `depth` times, from a row of RMS 1 along beta: a Pre-Norm stack of identities.
    """
    measured = {name: _outputs(name, scales, dim, depth) for name in activations}
    curves = {name: outputs for name, (outputs, _) in measured.items()}
    stacks = {name: end for name, (_, end) in measured.items()}
    slopes = {name: slope(scales[-4:], values[-4:]) for name, values in curves.items()}
    table = _table(
        "RMS of the output of SeeDNorm",
        (
            Column("σ", "", numeric=False),
            *(Column(f"k = {k:g}", "of the input k x") for k in scales[::2]),
            Column("Exponent", "in k"),
            Column(f"After {depth} additions", "RMS of x ← x + N(x), from 1"),
        ),
        [
            [name, *(significant(v, 3) for v in curves[name][::2]), f"{slopes[name]:.2f}", f"{stacks[name]:.3g}"]
            for name in activations
        ],
    )
    bounded = [name for name in activations if name in BOUNDED]
    unbounded = [name for name in activations if name not in BOUNDED]
    claims = (
        Claim(
            text="With a bounded σ the output of SeeDNorm is bounded; with GELU and SiLU it grows with the input, as "
            "if nothing were normalised.",
            holds=all((abs(slopes[n]) < 0.05) if n in BOUNDED else (abs(slopes[n] - 1) < 0.05) for n in activations),
            measured=", ".join(f"exponent {slopes[name]:.2f} with {name}" for name in activations),
        ),
        Claim(
            text="In a residual stack an unbounded σ makes the stream grow exponentially with depth, a bounded one "
            "linearly.",
            holds=all(stacks[n] > 100 * depth for n in unbounded) and all(stacks[n] < 4 * depth for n in bounded),
            measured=", ".join(f"RMS {stacks[name]:.3g} after {depth} additions with {name}" for name in activations),
        ),
    )
    return _result(
        name="unbounded-activation",
        title="SeeDNorm with bounded and unbounded σ",
        setting=f"SeeDNorm of width {dim} with α = γ = 1 and a β of standard deviation 0.05, inputs along β; nothing "
        "is trained.",
        record={"scales": list(scales), "rms": curves, "slopes": slopes, "stacks": stacks, "depth": depth},
        table=table,
        curves=curves,
        x=scales,
        labels=("factor k on the input", "RMS of the output"),
        claims=claims,
    )


# --- parts


@torch.no_grad()
def _outputs(activation: str, scales: Sequence[float], dim: int, depth: int) -> tuple[list[float], float]:
    """Return the RMS of the output at k x, and that of a row along beta after `depth` additions of the output."""
    norm = _seednorm(dim, 0.05, activation=activation).double()
    assert norm.beta is not None
    along = norm.beta / norm.beta.square().mean().sqrt()
    rows = along + 0.5 * _normal((32, dim), 2)
    outputs = [float(norm(k * rows).square().mean().sqrt()) for k in scales]
    x = along
    for _ in range(depth):
        x = x + norm(x)
    return outputs, float(x.square().mean().sqrt())


def _normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _seednorm(dim: int, beta: float, activation: str = "tanh") -> SeeDNorm:
    """Return a SeeDNorm whose beta is normal with a standard deviation."""
    norm = SeeDNorm(dim, eps=0.0, activation=activation)
    with torch.no_grad():
        assert norm.beta is not None
        norm.beta.copy_(beta * _normal((dim,), 3))
    return norm


def _dot_variance(width: int, heads: int, draws: int, *, aligned: bool = False) -> float:
    """Return the variance of the dot products over rows and draws of beta; their mean is 0."""
    norm, generator = SeeDNorm(width, heads=heads).double(), torch.Generator().manual_seed(width)
    assert norm.beta is not None
    total = 0.0
    for _ in range(draws):
        x = torch.randn(64, width, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            norm.beta.copy_(torch.randn(width, generator=generator, dtype=torch.float64))
            if aligned:
                x = x + torch.randn(64, 1, generator=generator, dtype=torch.float64) * norm.beta
            total += float(norm.dot_products(x).square().mean())
    return total / draws


def _gradient(norm: Norm, x: Tensor, upstream: Tensor) -> Tensor:
    """Return dL/dx for a gradient of the output."""
    x = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(norm(x), x, upstream)
    return found


def _formula_error(norm: Norm, x: Tensor, upstream: Tensor) -> float:
    """Return the largest difference between a SeeDNorm's gradient and its formula, relative to the largest element."""
    assert isinstance(norm, SeeDNorm) and norm.alpha is not None and norm.beta is not None and norm.gamma is not None
    with torch.no_grad():
        size = x.square().mean(-1, keepdim=True).sqrt()
        y, squashed = x / size, torch.tanh((x * norm.beta).sum(-1, keepdim=True))
        weighted = (squashed * norm.alpha + norm.gamma) * upstream
        direct = (weighted - y * (weighted * y).mean(-1, keepdim=True)) / size
        dynamic = norm.beta * (1 - squashed.square()) * (norm.alpha * upstream * y).sum(-1, keepdim=True)
    found = _gradient(norm, x, upstream)
    return float((found - direct - dynamic).abs().max() / found.abs().max())


def _row(dim: int, share: float) -> Tensor:
    """Return a row of RMS 1 whose first element is a share of its norm, the others equal."""
    rest = math.sqrt((1 - share**2) * dim / (dim - 1))
    return torch.tensor([share * math.sqrt(dim), *[rest] * (dim - 1)], dtype=torch.float64)


def _own_derivatives(norm: Norm, rows: Tensor) -> tuple[list[float], list[float]]:
    """Return N_0 and dN_0/dx_0 of every row."""
    rows = rows.clone().requires_grad_()
    values = norm(rows)[:, 0]
    (gradient,) = torch.autograd.grad(values.sum(), rows)
    return values.tolist(), gradient[:, 0].tolist()


def _table(title: str, columns: tuple[Column, ...], rows: Sequence[Sequence[str]]) -> Table:
    return Table(title, columns, (RowGroup("", tuple(tuple(map(Entry, row)) for row in rows)),))


def _result(
    *,
    name: str,
    title: str,
    setting: str,
    record: Mapping[str, object],
    table: Table,
    curves: Mapping[str, Sequence[float]],
    x: Sequence[float] | Mapping[str, Sequence[float]],
    labels: tuple[str, str],
    claims: tuple[Claim, ...],
    scale: str = "log",
    heading: str = "",
) -> TheoryResult:
    """Return the result with a figure of the curves over x, one for all or each its own, both axes of one scale."""
    styles = plain_styles(list(curves))
    lines = [
        TheoryLine(name=each, x=x[each] if isinstance(x, Mapping) else x, y=values, style=styles[each])
        for each, values in curves.items()
    ]
    figure = Figure(
        name=name,
        title=title,
        caption=setting,
        alternative="; ".join(f"{each}: {values[0]:.3g} to {values[-1]:.3g}" for each, values in curves.items()),
        draw=lambda theme: draw_lines(
            lines,
            theme,
            title=heading or title,
            x_label=labels[0],
            y_label=labels[1],
            x_scale=scale,
            y_scale=scale,
        ),
    )
    return TheoryResult(
        name=name, title=title, paper=PAPER, setting=setting, record=record, table=table, figure=figure, claims=claims
    )
