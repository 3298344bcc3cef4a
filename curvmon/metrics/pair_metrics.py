"""The four metrics of the blocks H[v, w] = d²L / de_v de_w between the outputs of two layers v and w."""

from __future__ import annotations

from curvmon.metrics.registry import AlertSpec, PairMetric

# Thresholds were chosen on tuning runs (benchmarks/alerts.py). The stable rank needs a larger one: a single sample of
# the probe batch can change it.

RESONANCE = PairMetric(
    name="resonance",
    title="resonance",
    symbol="R",
    meaning="size of the Hessian block between two layers: how a change at one changes the gradient at the other",
    good="falls slowly with the distance between the layers",
    bad="distant pairs orders of magnitude below close ones; a jump",
    action="add skip connections, change the initialization; after a jump, look at the layer the alert names",
    log_scale=True,
    chart="resonance by distance",
    figure_title="resonance  R = ‖H‖",
    alert=AlertSpec(
        threshold=6.0,
        family_threshold=6.0,
        smallest_change=0.4,
        rise="the loss curves more strongly between these layers, optimizer steps overshoot sooner",
        fall="the curvature between these layers vanished, gradients may have stopped flowing",
        per_pair=False,
    ),
)
COUPLING = PairMetric(
    name="coupling",
    title="coupling",
    symbol="C",
    meaning="resonance normalized by the layers' own: near 0, they act independently; near 1, together",
    good="near 1 in residual ReLU networks; lower in plain networks and with smooth activations",
    bad="a sudden fall; above 1, curvature outside Gauss–Newton contributes",
    action="look at the layer the alert names; above 1, look at the GN-Gap (for bottlenecks, at the stable rank)",
    chart="coupling by distance",
    figure_title="coupling  C",
    unit_diagonal=True,
    axis_max=1.0,
    alert=AlertSpec(
        threshold=8.0,
        family_threshold=4.0,
        smallest_change=0.05,
        rise="these layers now act on the loss jointly",
        fall="a path between these layers no longer carries curvature",
    ),
)
STABLE_RANK = PairMetric(
    name="stable_rank",
    title="stable rank",
    symbol="D",
    meaning="in how many directions the curvature lies",
    good="a few, 2 to 5 in the papers; how it moves during training depends on the network",
    bad="1.0 between all layers while the loss is still high",
    action="look for collapsed representations, or a single sample that dominates the loss",
    chart="stable rank by distance",
    figure_title="stable rank  D",
    color_range=(1.0, 2.0),
    alert=AlertSpec(
        threshold=9.0,
        family_threshold=4.0,
        smallest_change=0.25,
        rise="the curvature spread to more directions",
        fall="the curvature collapsed to fewer directions",
    ),
)
GN_GAP = PairMetric(
    name="gn_gap",
    title="GN-Gap",
    meaning="curvature between layer outputs that Gauss–Newton misses, relative to what it captures",
    good="exactly 0 for convolutions, linear layers and ReLU; pooled over pairs, below 1",
    bad="pooled over pairs, above 1; single pairs can be far above it in a healthy network",
    action="do not rely on Gauss–Newton there; try ReLU, or an activation with a smaller second derivative",
    log_scale=True,
    chart="GN-Gap by distance",
    alert=AlertSpec(
        threshold=6.0,
        family_threshold=3.0,
        smallest_change=0.4,
        rise="Gauss-Newton misses more of the curvature, which comes from nonlinear activations",
        fall="Gauss-Newton captures more of the curvature than before",
        offset=0.02,
    ),
)
