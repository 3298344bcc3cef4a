"""The quantities that curvmon reports: what each is called, what it means, and how it is shown.

Four pair metrics of the blocks H[v, w] = d²L / de_v de_w between the outputs of layers v and w, and the numbers that a
snapshot has once: the spectrum of the loss Hessian, the loss, the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from curvmon.metrics.pair_summaries import mean_over_pairs, pooled_gap
from curvmon.metrics.registry import SPECTRUM, AlertSpec, PairMetric, ScalarMetric
from curvmon.metrics.step_metrics import STEP_METRICS
from curvmon.records import Snapshot


def _spectrum(attribute: str) -> Callable[[Snapshot], Sequence[float]]:
    return lambda snapshot: () if snapshot.spectrum is None else (getattr(snapshot.spectrum, attribute),)


def _snapshot(attribute: str) -> Callable[[Snapshot], Sequence[float]]:
    return lambda snapshot: (float(getattr(snapshot, attribute)),)


def _further_eigenvalues(snapshot: Snapshot) -> Sequence[float]:
    return () if snapshot.spectrum is None else snapshot.spectrum.eigenvalues[1:].tolist()


def _further_residuals(snapshot: Snapshot) -> Sequence[float]:
    return () if snapshot.spectrum is None else snapshot.spectrum.residuals[1:].tolist()


PROBE_LOSS_KEY = "curvmon/probe_loss"
SCALARS = (
    ScalarMetric(
        name="lambda_1",
        title="top eigenvalue",
        key="curvmon/lambda_1",
        read=_snapshot("sharpness"),
        stderr=_snapshot("sharpness_error"),
        symbol="λ₁",
        meaning="the sharpness: largest eigenvalue of the loss Hessian w.r.t. the parameters",
        good="rises until the stability ratio is about 1, then changes slowly",
        bad="a jump",
        action="look at the stability ratio, and at the layer the alert names",
        log_scale=True,
        section=SPECTRUM,
        chart="top eigenvalues",
        alert=AlertSpec(
            smallest_change=0.4,
            rise="the loss became sharper along its sharpest direction",
            fall="the loss became flatter along its sharpest direction",
        ),
    ),
    ScalarMetric(
        name="lambda_k",
        title="further top eigenvalues",
        key="curvmon_spectrum/lambda_{}",
        read=_further_eigenvalues,
        stderr=_further_residuals,
        log_scale=True,
        first=2,
        section=SPECTRUM,
        chart="top eigenvalues",
    ),
    ScalarMetric(
        name="lambda_min",
        title="smallest eigenvalue",
        key="curvmon/lambda_min",
        read=_spectrum("smallest"),
        stderr=_spectrum("smallest_residual"),
        symbol="λ_min",
        meaning="the most negative curvature",
        good="small compared with λ₁",
        bad="below −0.5 λ₁ while the loss stalls: a saddle",
        action="more noise, momentum, a larger learning rate",
    ),
    ScalarMetric(
        name="stability_ratio",
        title="stability ratio",
        key="curvmon/stability_ratio",
        read=_spectrum("stability_ratio"),
        meaning="λ₁ over the largest stable sharpness of the optimizer",
        good="up to about 1, which most runs reach; with mini-batches, several times 1",
        bad="far above 1 for long (alert at 20)",
        action="lower the learning rate, use a longer warm-up",
    ),
    ScalarMetric(
        name="trace",
        title="trace",
        key="curvmon/trace",
        read=_spectrum("trace"),
        stderr=_spectrum("trace_stderr"),
        symbol="tr H",
        meaning="sum of all eigenvalues",
        good="changes slowly",
        bad="a jump",
        action="look at λ₁: if it did not change, many small eigenvalues did",
    ),
    ScalarMetric(
        name="ggn_lambda_1",
        title="top eigenvalue of the Gauss-Newton matrix",
        key="curvmon_detail/ggn_lambda_1",
        read=_spectrum("ggn_eigenvalue"),
        detail=True,
    ),
    ScalarMetric(
        name="ggn_error",
        title="GGN error",
        key="curvmon/ggn_error",
        read=_spectrum("ggn_error"),
        meaning="relative difference between the top eigenvalue of the Gauss–Newton matrix and λ₁",
        good="near 0",
        bad="near 1",
        action="do not use the sharpness of Gauss–Newton in place of λ₁",
    ),
    *STEP_METRICS,
    ScalarMetric(
        name="loss",
        title="loss of the probe batch",
        key=PROBE_LOSS_KEY,
        read=_snapshot("loss"),
        alert=AlertSpec(
            smallest_change=0.2,
            rise="the network is forgetting what it had learned",
            fall="the network improved abruptly",
        ),
    ),
    ScalarMetric(
        name="alerts",
        title="alerts so far",
        key="curvmon/alerts",
        read=_snapshot("alerts"),
    ),
    ScalarMetric(
        name="overhead",
        title="overhead",
        key="curvmon/overhead",
        read=_snapshot("overhead"),
    ),
    *(
        ScalarMetric(name=name, title=title, key=f"curvmon_detail/{name}", read=_snapshot(name), detail=True)
        for name, title in (
            ("seconds", "seconds"),
            ("hvps", "Hessian-vector products"),
            ("skipped", "skipped measurements"),
        )
    ),
)


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
    headline=mean_over_pairs,
    figure_title="resonance  R = ‖H‖",
    alert=AlertSpec(
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
    headline=mean_over_pairs,
    figure_title="coupling  C",
    unit_diagonal=True,
    axis_max=1.0,
    alert=AlertSpec(
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
    headline=mean_over_pairs,
    figure_title="stable rank  D",
    color_range=(1.0, 2.0),
    alert=AlertSpec(
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
    headline=pooled_gap,
    zero_is_constant=True,
    alert=AlertSpec(
        smallest_change=0.4,
        rise="Gauss-Newton misses more of the curvature, which comes from nonlinear activations",
        fall="Gauss-Newton captures more of the curvature than before",
        offset=0.02,
    ),
)
