"""The table of everything that can be reproduced, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from siamesenorm.comparison.report_parts import Report
from siamesenorm.comparison.sweep_grid import CONTROL
from siamesenorm.errors import unknown
from siamesenorm.recipes.gradient_theory import gradient_at_init, gradient_spikes
from siamesenorm.recipes.item import Item, RunGrid
from siamesenorm.recipes.overhead import overhead_report
from siamesenorm.recipes.seednorm_theory import (
    dynamic_variance,
    dyt_equivalence,
    gradient_scaling,
    unbounded_activation,
)
from siamesenorm.recipes.theory import TheoryResult
from siamesenorm.topologies import available_topologies

POST_PRE_CODE = "siamese-post-pre:post_norm=lazy,readout=code"
TABLE_1 = ("pre", CONTROL, "post", "deepnorm", "residual", "dhc-2", "hybridnorm", "siamese")
TABLE_3 = (
    *("hybridnorm", "hybridnorm:depth_scale=code", "residual-hybridnorm"),
    *("siamese:depth_scale=none,normalized_input=false", "siamese:depth_scale=none"),
    *("siamese:normalized_input=false", "siamese"),
)
DEPTH = ("pre", CONTROL, "deepnorm", "siamese-post-pre", "siamese")
SEEDNORM = ("pre", "pre + dyt", "pre + seednorm")
SEEDNORM_ABLATION = (
    *("pre + seednorm", "pre + seednorm:alpha_initial=0.1", "pre + seednorm:alpha_initial=10"),
    *("pre + seednorm:scalar_alpha=true", "pre + seednorm:elementwise=true", "pre + seednorm:without=alpha"),
    *("pre + seednorm:without=beta", "pre + seednorm:without=gamma", "pre"),
)
VISION = ("pre + layernorm", "pre + dyt", "pre + seednorm")
HEADS = tuple(f"pre + seednorm:heads={heads}" for heads in (1, 8, 16, 32))
LEAGUE = (*available_topologies(), CONTROL, "pre + seednorm", "siamese + seednorm")
LEAGUE_DEEPER = ("pre", CONTROL, "post", "deepnorm", "dhc-2", "siamese-post-pre", "siamese")

XIONG, SALAZAR = "Xiong et al. (arXiv 2002.04745)", "Salazar and Nguyen (arXiv 1910.05895)"
SEEDNORM_THEORY = "SeeDNorm, theory"
THEORY: dict[str, tuple[Callable[[], TheoryResult], str, str]] = {
    "gradient-at-init": (gradient_at_init, XIONG, "gradient norms by layer before training, Pre-Norm and Post-Norm"),
    "gradient-spikes": (gradient_spikes, SALAZAR, "spikes of the gradient norm in the first steps"),
    "dynamic-variance": (dynamic_variance, SEEDNORM_THEORY, "variance of the dynamic dot product by width and heads"),
    "gradient-scaling": (gradient_scaling, SEEDNORM_THEORY, "gradients at inputs k x"),
    "dyt-equivalence": (dyt_equivalence, SEEDNORM_THEORY, "DyT and RMSNorm at a constant norm"),
    "unbounded-activation": (unbounded_activation, SEEDNORM_THEORY, "unbounded activations"),
}
"""Experiments on theory by name: each a matter of seconds, its paper, and its title."""


def _theory_page(measure: Callable[[], TheoryResult]) -> Report:
    return measure().report()


ITEMS: dict[str, Item] = {
    item.name: item
    for item in (
        Item(
            name="table1",
            paper="SiameseNorm, Table 1",
            title="eight methods at three learning rates, and three of them on a longer run",
            published="Language models of 1.3 B parameters were trained on 100 B tokens at a conservative, a high and "
            "an aggressive learning rate, and on 350 B tokens at the last. Post-Norm and HybridNorm diverged first; "
            "SiameseNorm converged at all rates and had the lowest perplexity at each. The conference version adds "
            "SpanNorm: 11.00, 10.86, diverged (not in these runs: its scaling is not known).",
            grids=(
                RunGrid(name="three rates", methods=TABLE_1, headline=("pre", "siamese")),
                RunGrid(name="3.5 times the steps", methods=("pre", "dhc-2", "siamese"), rates=(2,), length=3.5),
                RunGrid(
                    name="evaluated",
                    methods=("pre", CONTROL, "dhc-2", "siamese"),
                    rates=(1,),
                    seeds="weighted",
                    evaluations=("perplexity", "multiple-choice"),
                ),
            ),
        ),
        Item(
            name="table2",
            paper="SiameseNorm, Table 2",
            title="what Pre-Norm gains when it is coupled with Post-Norm, or with HybridNorm",
            published="At each of three learning rates, the perplexity of Pre-Norm minus that of SiameseNorm, which "
            "couples it with Post-Norm or with HybridNorm. Coupling with HybridNorm gained more at every rate.",
            grids=(RunGrid(name="three rates", methods=("pre", CONTROL, "siamese-post-pre", "siamese")),),
        ),
        Item(
            name="table3",
            paper="SiameseNorm, Table 3 and Figure 4",
            title="SiameseNorm without its parts: two streams, depth-wise scaling, normalised input",
            published="At the high learning rate, HybridNorm alone diverged and with ResiDual's shortcut had loss "
            "spikes; with two streams it converged. Depth-wise scaling and normalised input each lowered the "
            "perplexity.",
            grids=(RunGrid(name="high rate", methods=(*TABLE_3, "pre", CONTROL), rates=(1,)),),
        ),
        Item(
            name="depth",
            paper="SiameseNorm, depth sweep",
            title="models of equal size and growing depth",
            published="Language models of 390 M parameters with 10, 17, 33 and 80 layers were trained on 12 B tokens. "
            "SiameseNorm's gain over Pre-Norm grew with depth; Pre-Norm was worst at 80 layers.",
            grids=tuple(
                RunGrid(name=name, methods=DEPTH, rates=(1,), shape=shape)
                for shape, name in enumerate(("shallow", "middle", "deep", "deepest"))
            ),
        ),
        Item(
            name="figure2",
            paper="SiameseNorm, Figure 2",
            title="magnitude of the hidden state by depth, and loss curves, with a normalised embedding beside them",
            published="At the high learning rate, Pre-Norm's hidden state grows with depth by orders of magnitude. "
            "With an RMSNorm on the embedding the profile is nearly flat, and the perplexity 0.4 higher.",
            grids=(
                RunGrid(
                    methods=("pre", CONTROL, "pre-embednorm", "siamese"),
                    rates=(1,),
                    seeds="weighted",
                    evaluations=("hidden-magnitude",),
                ),
            ),
        ),
        Item(
            name="figure5",
            paper="SiameseNorm, Figure 5",
            title="gradient norms over training",
            published="At the high learning rate, HybridNorm's gradient norm repeatedly exceeded 100; after the "
            "warm-up those of Pre-Norm and SiameseNorm stayed below 0.5.",
            grids=(RunGrid(methods=("pre", CONTROL, "hybridnorm", "siamese"), rates=(1,)),),
        ),
        Item(
            name="figure6",
            paper="SiameseNorm, Figure 6 and section 5.2",
            title="what each stream contributes to the input of sublayers, and to the output",
            published="Both streams keep a significant share of the input of most sublayers. At the end the HybridNorm "
            "stream has the larger weight (1.05 against 0.42), and its prediction agrees with the model's more often "
            "(42.6 % against 16.2 %).",
            grids=(
                RunGrid(
                    methods=("siamese", "siamese-post-pre"),
                    rates=(1,),
                    seeds="weighted",
                    evaluations=("stream-share", "fusion", "logit-lens"),
                ),
            ),
        ),
        Item(
            name="figure8",
            paper="SiameseNorm, Figure 8",
            title="loss curves of the longer run",
            published="Pre-Norm, Hyper-Connections and SiameseNorm on 350 B tokens at the aggressive learning rate: "
            "SiameseNorm's training loss is the lowest throughout.",
            grids=(RunGrid(methods=("pre", "dhc-2", "siamese"), rates=(2,), length=3.5),),
        ),
        Item(
            name="zero-warmup",
            paper="SiameseNorm, no warm-up",
            title="training without a warm-up of the learning rate",
            published="SiameseNorm trains without any warm-up.",
            grids=(
                RunGrid(
                    methods=("pre", CONTROL, "post", "hybridnorm", "deepnorm", "siamese-post-pre", "siamese"),
                    rates=(1,),
                    warmup=False,
                ),
            ),
        ),
        Item(
            name="pruning",
            paper="SiameseNorm, pruning of deep layers",
            title="the loss without a block, by depth",
            published="Removing deep layers of Pre-Norm costs little; removing those of SiameseNorm costs much: they "
            "are used.",
            grids=(
                RunGrid(methods=("pre", CONTROL, "siamese"), rates=(1,), seeds="weighted", evaluations=("pruning",)),
            ),
        ),
        Item(
            name="numerics",
            paper="",
            title="outliers, attention sinks, rounding, transitions and effective depth of trained models",
            published="No paper compares topologies in these.",
            grids=(
                RunGrid(
                    methods=DEPTH,
                    rates=(1,),
                    shape=2,
                    evaluations=("outliers", "quantisation", "jacobians", "effective-depth"),
                ),
            ),
        ),
        Item(
            name="moe",
            paper="SiameseNorm, mixture of experts",
            title="a mixture of experts",
            published="A mixture of experts of 15 B parameters, 2 B of them active, on 100 B tokens: perplexity 7.92 "
            "with Pre-Norm, 7.76 with SiameseNorm, whose mean accuracy on tasks is 63.07 %.",
            grids=(RunGrid(domain="moe", methods=("pre", CONTROL, "siamese-post-pre", "siamese"), rates=(1,)),),
        ),
        Item(
            name="cost",
            paper="SiameseNorm, cost",
            title="parameters, operations and memory traffic that the second stream adds",
            published="On a mixture of experts of 15 B parameters a step is 0.5 % slower and needs 2 % more memory.",
            experiment=overhead_report,
        ),
        Item(
            name="deit",
            paper="SiameseNorm, DeiT-S",
            title="image classification",
            published="DeiT-S on ImageNet: 79.8 % with Pre-Norm, 81.3 % with SiameseNorm.",
            grids=(RunGrid(domain="images", methods=("pre", "siamese-post-pre", POST_PRE_CODE), chosen=True),),
        ),
        Item(
            name="dit",
            paper="SiameseNorm, DiT-L/4",
            title="class-conditional diffusion",
            published="DiT-L/4 on ImageNet after 400,000 steps: FID 45.21 with Pre-Norm, 41.34 with SiameseNorm.",
            grids=(RunGrid(domain="diffusion", methods=("pre", POST_PRE_CODE), chosen=True),),
        ),
        Item(
            name="seednorm-language",
            paper="SeeDNorm, main results on language",
            title="SeeDNorm, DyT and RMSNorm in a mixture of experts and a dense model",
            published="OLMoE of 1.3 B parameters on 500 B tokens: loss 2.900 with SeeDNorm, 2.922 with RMSNorm, 2.968 "
            "with DyT; of 7 B on 1000 B tokens 2.631 against 2.644; OLMo 2 of 1 B: 2.879 against 2.884.",
            grids=(
                RunGrid(
                    name="mixture of experts",
                    domain="olmoe",
                    methods=SEEDNORM,
                    chosen=True,
                    headline=("pre", "pre + seednorm"),
                ),
                RunGrid(
                    name="dense", domain="olmo2", methods=SEEDNORM, chosen=True, headline=("pre", "pre + seednorm")
                ),
            ),
        ),
        Item(
            name="seednorm-ablation",
            paper="SeeDNorm, ablation table",
            title="SeeDNorm's parts and initial values",
            published="OLMoE of 1.3 B parameters on 500 B tokens; every change of SeeDNorm raised the loss, an initial "
            "alpha of 10 most.",
            grids=(RunGrid(domain="olmoe", methods=SEEDNORM_ABLATION, rates=(1,)),),
        ),
        Item(
            name="seednorm-activation",
            paper="SeeDNorm, activation",
            title="bounded and unbounded activations",
            published="With GeLU or Swish in place of tanh training failed; sigmoid and hardtanh are viable, tanh is "
            "best.",
            grids=(
                RunGrid(
                    domain="olmoe",
                    methods=(
                        "pre + seednorm",
                        *(f"pre + seednorm:activation={name}" for name in ("sigmoid", "hardtanh", "gelu", "silu")),
                    ),
                    rates=(1,),
                ),
            ),
        ),
        Item(
            name="seednorm-vision",
            paper="SeeDNorm, main results on vision",
            title="SeeDNorm, DyT and LayerNorm in image classification and masked autoencoding",
            published="ViT-B on ImageNet: 82.7 % with SeeDNorm, 82.5 % with DyT, 82.3 % with LayerNorm; after masked "
            "autoencoding 83.5, 83.2 and 83.2 %.",
            grids=(
                RunGrid(name="classification", domain="vit-b", methods=VISION, chosen=True),
                RunGrid(name="masked autoencoding", domain="autoencoder", methods=VISION, chosen=True),
            ),
        ),
        Item(
            name="seednorm-heads",
            paper="SeeDNorm, heads",
            title="SeeDNorm's heads in image classification",
            published="ViT-B on ImageNet: training failed with 1 head; 82.5, 82.7 and 82.5 % with 8, 16 and 32.",
            grids=(RunGrid(domain="vit-b", methods=HEADS, rates=(1,)),),
        ),
        Item(
            name="seednorm-convnext",
            paper="SeeDNorm, ConvNeXt",
            title="SeeDNorm, DyT and LayerNorm in a convolutional network",
            published="ConvNeXt-B on ImageNet: 83.7 % with each of SeeDNorm, DyT and LayerNorm.",
            grids=(RunGrid(domain="convnext", methods=VISION, chosen=True),),
        ),
        *(
            Item(
                name=name,
                paper=paper,
                title=title,
                published="A measurement of seconds, without a trained run.",
                experiment=partial(_theory_page, measure),
            )
            for name, (measure, paper, title) in THEORY.items()
        ),
        Item(
            name="league",
            paper="",
            title="all topologies, each at its own best learning rate, and six of them at a second depth",
            published="No paper compares all of these at a learning rate of their own.",
            ranked=True,
            grids=(
                RunGrid(
                    name="league",
                    methods=LEAGUE,
                    chosen=True,
                    headline=("pre", CONTROL, "siamese", "siamese-post-pre", "pre + seednorm"),
                ),
                RunGrid(name="deeper", methods=LEAGUE_DEEPER, rates=(1,), shape=2),
                *(
                    RunGrid(name=name, methods=("pre",), rates=(1,), length=length, seeds="reported")
                    for name, length in (("half the steps", 0.5), ("twice the steps", 2.0))
                ),
            ),
        ),
    )
}
"""Items by name, in the order of the papers."""


def find_item(name: str) -> Item:
    """Return an item; raises UserError for an unknown name."""
    if name not in ITEMS:
        raise unknown("item", name, ITEMS)
    return ITEMS[name]
