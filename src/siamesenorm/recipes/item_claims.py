"""The claims of the papers by item, each as a declared comparison of cells."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from siamesenorm.comparison.sweep_grid import CONTROL
from siamesenorm.recipes.claims import Cell, PaperClaim
from siamesenorm.recipes.items import POST_PRE_CODE

RATES = ("conservative", "high", "aggressive")
OVER_CONTROL = "SiameseNorm is better than Pre-Norm with the same QKV-norm"
SHAPES = ("shallow", "middle", "deep", "deepest")


def against(
    text: str,
    method: str,
    baseline: str,
    *,
    grid: str = "",
    rate: int | None = None,
    measure: str = "loss",
    sign: int = -1,
    published: tuple[str, str, float] | None = None,
    own: bool = False,
) -> PaperClaim:
    """Return the claim that a measure of a method is lower (sign -1) or higher (1) than that of a baseline."""
    terms = ((1.0, Cell(method, grid, rate)), (-1.0, Cell(baseline, grid, rate)))
    return PaperClaim(text=text, measure=measure, terms=terms, sign=sign, published=published, own=own)


higher = partial(against, sign=1)


def hypothesis(text: str, method: str, baseline: str, **options: Any) -> PaperClaim:
    """Return a claim that no paper states, as `against` does."""
    return against(text, method, baseline, own=True, **options)


def _table1() -> Iterator[PaperClaim]:
    at = partial(against, grid="three rates")
    for rate, word in enumerate(RATES):
        yield at(f"SiameseNorm is better than Pre-Norm at the {word} rate", "siamese", "pre", rate=rate)
        yield at(f"SiameseNorm is better than Hyper-Connections at the {word} rate", "siamese", "dhc-2", rate=rate)
    yield at("HybridNorm is better than Pre-Norm at the conservative rate", "hybridnorm", "pre", rate=0)
    for method, rate in (("hybridnorm", 1), ("post", 1), ("deepnorm", 2)):
        text = f"{method} fails at the {RATES[rate]} rate, where SiameseNorm converges"
        yield at(text, method, "siamese", rate=rate, measure="failed", sign=1)
    for rate, word in enumerate(RATES):
        yield hypothesis(f"{OVER_CONTROL} at the {word} rate", "siamese", CONTROL, grid="three rates", rate=rate)
    long = "3.5 times the steps"
    yield against("SiameseNorm is better than Pre-Norm on the longer run", "siamese", "pre", grid=long, rate=2)
    for measure, text in (("average", "the mean of the tasks"), ("arithmetic", "arithmetic")):
        yield higher(f"SiameseNorm is better in {text}", "siamese", "pre", grid="evaluated", rate=1, measure=measure)


def _table2() -> Iterator[PaperClaim]:
    at = partial(against, grid="three rates", published=("ppl_reduction", "PPL", -1.0))
    for rate, word in enumerate(RATES):
        yield at(f"coupling with Post-Norm improves Pre-Norm at the {word} rate", "siamese-post-pre", "pre", rate=rate)
        text = f"coupling with HybridNorm gains more than with Post-Norm at the {word} rate"
        yield at(text, "siamese", "siamese-post-pre", rate=rate)


def _table3() -> Iterator[PaperClaim]:
    parts = {
        "hybridnorm:depth_scale=code": "two streams are better than HybridNorm with depth-wise scaling",
        "residual-hybridnorm": "two streams are better than ResiDual's shortcut",
        "siamese:depth_scale=none": "depth-wise scaling improves SiameseNorm",
        "siamese:normalized_input=false": "normalised input improves SiameseNorm",
    }
    text = "HybridNorm alone fails, where SiameseNorm converges"
    yield higher(text, "hybridnorm", "siamese", grid="high rate", rate=1, measure="failed")
    for method, text in parts.items():
        yield higher(text, method, "siamese", grid="high rate", rate=1)
    text = "without depth-wise scaling SiameseNorm is still better than Pre-Norm"
    yield against(text, "siamese:depth_scale=none", "pre", grid="high rate", rate=1)


def _depth() -> Iterator[PaperClaim]:
    for shape in SHAPES:
        yield against(f"SiameseNorm is better than Pre-Norm, {shape}", "siamese", "pre", grid=shape, rate=1)
        yield hypothesis(f"{OVER_CONTROL}, {shape}", "siamese", CONTROL, grid=shape, rate=1)
    signs = {("siamese", "deepest"): 1, ("pre", "deepest"): -1, ("siamese", "shallow"): -1, ("pre", "shallow"): 1}
    yield PaperClaim(
        text="SiameseNorm's gain over Pre-Norm grows from the shallowest to the deepest model",
        measure="loss",
        terms=tuple((factor, Cell(method, grid, 1)) for (method, grid), factor in signs.items()),
        sign=-1,
    )
    yield PaperClaim(
        text="Pre-Norm is worse at the largest depth than at the middle one",
        measure="loss",
        terms=((1.0, Cell("pre", "deepest", 1)), (-1.0, Cell("pre", "middle", 1))),
        sign=1,
    )


def _figures() -> Iterator[tuple[str, PaperClaim]]:
    yield "figure2", higher("a normalised embedding harms Pre-Norm", "pre-embednorm", "pre", rate=1)
    text = "a normalised embedding flattens the magnitude of Pre-Norm's hidden state"
    yield "figure2", against(text, "pre-embednorm", "pre", rate=1, measure="growth")
    text = "gradient norms of HybridNorm explode, those of SiameseNorm do not"
    yield "figure5", higher(text, "hybridnorm", "siamese", rate=1, measure="exploded")
    for measure, text in (
        ("fusion", "the bounded stream has the larger weight at the end"),
        ("lens", "the bounded stream agrees with the output more often"),
    ):
        yield "figure6", PaperClaim(text=text, measure=measure, terms=((1.0, Cell("siamese", rate=1)),), sign=1)
    for other in ("pre", "dhc-2"):
        yield "figure8", against(f"SiameseNorm is better than {other} on the longer run", "siamese", other, rate=2)
    text = "SiameseNorm trains without a warm-up"
    yield "zero-warmup", PaperClaim(text=text, measure="trained", terms=((1.0, Cell("siamese", rate=1)),), sign=1)
    text = "removing a deep block harms SiameseNorm more than Pre-Norm"
    yield "pruning", higher(text, "siamese", "pre", rate=1, measure="pruning")


def _other_models() -> Iterator[tuple[str, PaperClaim]]:
    yield "moe", against("SiameseNorm is better than Pre-Norm in a mixture of experts", "siamese", "pre", rate=1)
    text = "SiameseNorm is better than Pre-Norm in image classification"
    yield "deit", higher(text, POST_PRE_CODE, "pre", measure="accuracy")
    text = "SiameseNorm is better than Pre-Norm in diffusion"
    yield "dit", against(text, POST_PRE_CODE, "pre", measure="squared error", published=("fid", "FID", 1.0))


def _seednorm() -> Iterator[tuple[str, PaperClaim]]:
    seednorm, language, ablation = "pre + seednorm", "seednorm-language", "seednorm-ablation"
    for grid in ("mixture of experts", "dense"):
        yield language, against(f"SeeDNorm is better than RMSNorm, {grid}", seednorm, "pre", grid=grid)
    yield language, higher("DyT is worse than RMSNorm", "pre + dyt", "pre", grid="mixture of experts")
    changes = ("alpha_initial=0.1", "alpha_initial=10", "scalar_alpha=true", "elementwise=true")
    for change in (*changes, "without=alpha", "without=beta", "without=gamma"):
        yield ablation, higher(f"{change} harms SeeDNorm", f"{seednorm}:{change}", seednorm, rate=1)
    for activation in ("gelu", "silu"):
        text = f"the unbounded activation {activation} fails"
        claim = higher(text, f"{seednorm}:activation={activation}", seednorm, rate=1, measure="failed")
        yield "seednorm-activation", claim
    for other in ("layernorm", "dyt"):
        text = f"SeeDNorm is better than {other} in image classification"
        yield "seednorm-vision", higher(text, seednorm, f"pre + {other}", grid="classification", measure="accuracy")
    yield (
        "seednorm-vision",
        against(
            "SeeDNorm is better than LayerNorm in masked autoencoding",
            seednorm,
            "pre + layernorm",
            grid="masked autoencoding",
            measure="squared error",
            published=("accuracy", "% accuracy after fine-tuning", -1.0),
        ),
    )
    one, most = f"{seednorm}:heads=1", f"{seednorm}:heads=16"
    yield "seednorm-heads", higher("with 1 head training fails", one, most, rate=1, measure="failed")
    for heads in (8, 32):
        text = f"16 heads are better than {heads} in image classification"
        yield (
            "seednorm-heads",
            higher(text, most, f"{seednorm}:heads={heads}", rate=1, measure="accuracy"),
        )


def _hypotheses() -> Iterator[tuple[str, PaperClaim]]:
    for method, baseline, text in (
        ("siamese", "pre", "SiameseNorm is better than Pre-Norm"),
        ("siamese", CONTROL, OVER_CONTROL),
        ("pre + seednorm", "pre", "SeeDNorm is better than RMSNorm"),
    ):
        yield "league", hypothesis(f"{text}, each at its best rate", method, baseline, grid="league")
    for measure, sign, text in (
        ("outliers", -1, "SiameseNorm has smaller outliers than Pre-Norm"),
        ("w8a8", -1, "rounding to 8 bits harms SiameseNorm less than Pre-Norm"),
        ("w4a4", -1, "rounding to 4 bits harms SiameseNorm less than Pre-Norm"),
        ("effective blocks", 1, "SiameseNorm has more effective blocks than Pre-Norm"),
    ):
        yield "numerics", hypothesis(text, "siamese", "pre", rate=1, measure=measure, sign=sign)


def claims_of(item: str) -> tuple[PaperClaim, ...]:
    """Return the claims of an item, in the order of its paper."""
    tables = {"table1": _table1, "table2": _table2, "table3": _table3, "depth": _depth}
    named = [*_figures(), *_other_models(), *_seednorm(), *_hypotheses()]
    own = list(tables[item]()) if item in tables else []
    return tuple([*own, *(claim for name, claim in named if name == item)])
