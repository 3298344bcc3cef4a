"""What a measurement costs, in forward+backward passes of the same batch, compared with the papers' protocol.

    make bench                                                    all of it, about half an hour on one core
    python -m benchmarks.speed --only gelu,scaling                parts of it
    python -m benchmarks.speed --data cifar10_subset.npz          real images (arrays x_test, y_test) for the ResNets
    python -m benchmarks.speed --write docs/speed-table.md        keep the result

Absolute times mean nothing on a shared machine; everything is a ratio within one run, of one thread's own computing
time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvmon
from benchmarks.header import measured_on
from benchmarks.networks import DECODER_NODES, Decoder, classification_loss, next_token_loss, residual_gelu
from benchmarks.papers_protocol import papers_protocol, seconds_of_protocol
from benchmarks.reference import reference
from benchmarks.resnet18 import NODES, batch
from curvmon.operators.session import open_session
from curvmon.pairs.gauss_newton import gauss_newton_part
from curvmon.records import METRICS
from tests.helpers.resnet import resnet18

Lines = list[str]
Loss = Callable[[Any, Any], Tensor]


class Setting(NamedTuple):
    model: nn.Module
    batch: Any
    loss: Loss

    def passes(self, repeats: int = 5) -> list[float]:
        """Seconds of forward + backward."""
        times = []
        for _ in range(repeats):
            start = time.process_time()
            self.loss(self.model, self.batch).backward()
            times.append(time.process_time() - start)
        self.model.zero_grad(set_to_none=True)
        return times

    def measure(self, nodes: Sequence[str], **options: Any) -> tuple[curvmon.Measurement, float]:
        """A measurement, and how many passes it took; passes are timed before and after it."""
        before = self.passes()
        start = time.process_time()
        found = curvmon.measure(self.model, self.batch, loss=self.loss, nodes=nodes, **options)
        took = time.process_time() - start
        return found, took / statistics.median([*before, *self.passes()])


def _mean_error(found: Any, truth: Any, metric: str, pairs: Sequence[tuple[int, int]]) -> float:
    """Mean relative error over pairs where the metric is not trivially known."""
    errors = []
    for v, w in pairs:
        true = (truth[metric] if isinstance(truth, dict) else getattr(truth, metric))[v, w].item()
        if true > 1e-6 and not (metric == "coupling" and v == w):
            errors.append(abs(getattr(found, metric)[v, w].item() / true - 1))
    return statistics.mean(errors)


def _percent(values: Sequence[float]) -> str:
    return " | ".join(f"{100 * value:.2g} %" for value in values)


def _pairs(nodes: Sequence[int]) -> list[tuple[int, int]]:
    return [(v, w) for v in nodes for w in nodes if v <= w]


def resnet_relu(data: Path | None) -> Lines:
    setting = Setting(resnet18(seed=42, cifar_stem=True).eval(), batch(data), classification_loss)
    found, passes = setting.measure(NODES)
    double = curvmon.measure(
        resnet18(seed=42, cifar_stem=True).eval().double(),
        (setting.batch[0].double(), setting.batch[1]),
        loss=classification_loss,
        nodes=NODES,
    )
    off = max(_worst(found, double, metric) for metric in ("resonance", "coupling", "stable_rank"))
    unit = statistics.median(setting.passes())
    protocol = seconds_of_protocol(setting.model, setting.batch, loss=setting.loss, nodes=NODES) / unit
    return [
        "### ResNet-18, ReLU (CIFAR stem, 32 images, 5 nodes, 15 pairs)",
        "",
        "| | HVPs | forward+backward passes |",
        "|---|---|---|",
        f"| curvmon | {found.hvps} | **{passes:.1f}** |",
        f"| papers' protocol (one of each HVP timed, multiplied) | 1965 | {protocol:.0f} |",
        f"| ratio | | **{protocol / passes:.0f}** |",
        "",
        f"Float32 compared with float64: largest relative difference of any R, C, D {off:.1e}; "
        f"largest gap {found.gn_gap.max().item():.1e}.",
    ]


def _worst(one: curvmon.Measurement, other: curvmon.Measurement, metric: str) -> float:
    return float((getattr(one, metric) / getattr(other, metric) - 1).abs().max())


def resnet_silu(data: Path | None) -> Lines:
    setting = Setting(resnet18(activation=F.silu, seed=42, cifar_stem=True).eval(), batch(data), classification_loss)
    runs = [setting.measure(NODES, seed=seed) for seed in range(3)]
    passes = statistics.median(p for _, p in runs)
    unit = statistics.median(setting.passes())
    against = seconds_of_protocol(setting.model, setting.batch, loss=setting.loss, nodes=NODES) / unit
    some = [(1, 1), (1, 3), (3, 3)]
    on_flat_pairs = [(3, 4), (4, 4)]
    protocol = papers_protocol(
        setting.model, setting.batch, loss=setting.loss, nodes=NODES, only=[*some, *on_flat_pairs]
    )
    truth = reference(setting.model, setting.batch, loss=setting.loss, nodes=NODES, at=range(4), report=print)
    curved = _pairs(range(4))
    ours = [statistics.mean(_mean_error(m, truth, metric, curved) for m, _ in runs) for metric in METRICS]
    ours_on_some = [statistics.mean(_mean_error(m, truth, metric, some) for m, _ in runs) for metric in METRICS]
    theirs = [_mean_error(protocol, truth, metric, some) for metric in METRICS]
    flat = [pair for pair in _pairs(range(5)) if pair not in curved]
    exact = runs[0][0]
    on_flat = [_mean_error(protocol, exact, metric, on_flat_pairs) for metric in ("resonance", "stable_rank")]
    everywhere = [len(curved) / (len(curved) + len(flat)) * error for error in ours]
    return [
        "### ResNet-18, SiLU (CIFAR stem, 32 images, 5 nodes, 15 pairs)",
        "",
        "| | HVPs | passes | error of R | C | D | gap |",
        "|---|---|---|---|---|---|---|",
        f"| curvmon (median and means of 3 seeds) | {runs[0][0].hvps} | **{passes:.0f}** | {_percent(ours)} |",
        f"| the same, on three pairs | | | {_percent(ours_on_some)} |",
        f"| papers' protocol (one of each HVP timed, multiplied), on three pairs | 1965 | {against:.0f} | "
        f"{_percent(theirs)} |",
        f"| ratio | | **{against / passes:.0f}** | | | | |",
        "",
        "Mean relative errors over the ten pairs with T ≠ 0, compared with a long run (50 probes per node, 16 steps of "
        f"Golub-Kahan per pair, which still changed by at most {truth['change'].nan_to_num().max().item():.0e}). The "
        "protocol was run on three of them, those of layer1 and layer3. On the five pairs with T = 0 curvmon is exact "
        f"(mean over all pairs: R {100 * everywhere[0]:.2g} %, D {100 * everywhere[2]:.2g} %); on two of them the "
        f"protocol is off by {100 * on_flat[0]:.2g} % (R), {100 * on_flat[1]:.2g} % (D).",
    ]


def gelu() -> Lines:
    """Dense truth: errors and coverage over repetitions and networks."""
    errors: dict[str, list[float]] = {metric: [] for metric in METRICS}
    theirs: dict[str, list[float]] = {metric: [] for metric in METRICS}
    inside: dict[str, list[bool]] = {metric: [] for metric in METRICS}
    products, passes = [], []
    nodes = [f"blocks.{i}" for i in range(6)]
    for network in range(3):
        torch.manual_seed(network)
        setting = Setting(residual_gelu(), (torch.randn(32, 32), torch.randint(10, (32,))), classification_loss)
        truth = curvmon.exact(setting.model, setting.batch, loss=setting.loss, nodes=nodes)
        for seed in range(20):
            found, cost = setting.measure(nodes, seed=seed, max_hvps=72)
            products.append(found.hvps)
            passes.append(cost)
            for metric in METRICS:
                # pairs with the last block have T = 0 and are exact: only the others say something about errors
                for v, w in _pairs(range(5)):
                    if metric == "coupling" and v == w:
                        continue
                    true = getattr(truth, metric)[v, w].item()
                    error = abs(getattr(found, metric)[v, w].item() - true)
                    errors[metric].append(error / true)
                    inside[metric].append(error <= 1.96 * found.stderr[metric][v, w].item())
        protocol = papers_protocol(setting.model, setting.batch, loss=setting.loss, nodes=nodes)
        for metric in METRICS:
            theirs[metric].append(_mean_error(protocol, truth, metric, _pairs(range(5))))
    means = [statistics.mean(errors[metric]) for metric in METRICS]
    baseline = [statistics.mean(theirs[metric]) for metric in METRICS]
    covered = [statistics.mean(inside[metric]) for metric in METRICS]
    return [
        "### Residual GELU network (six blocks of width 64, 32 samples, 10 classes), compared with dense truth",
        "",
        "| | HVPs | passes | R | C | D | gap |",
        "|---|---|---|---|---|---|---|",
        f"| curvmon, mean error | {max(products)} at most | {statistics.median(passes):.0f} | {_percent(means)} |",
        f"| 95 % intervals that contain the truth | | | {' | '.join(f'{share:.3f}' for share in covered)} |",
        f"| papers' protocol, mean error | {protocol.hvps} | | {_percent(baseline)} |",
        "",
        "Three networks, 20 seeds each; the 15 pairs whose T is not zero (those with the last block are exact).",
    ]


def decoder() -> Lines:
    torch.manual_seed(0)
    setting = Setting(Decoder(), torch.randint(8192, (8, 129)), next_token_loss)
    nodes = DECODER_NODES
    found, passes = setting.measure(nodes)
    unit = statistics.median(setting.passes())
    protocol = seconds_of_protocol(setting.model, setting.batch, loss=setting.loss, nodes=nodes) / unit
    worst = [float((found.stderr[m] / getattr(found, m)).nan_to_num().max()) for m in METRICS]
    return [
        "### GPT-like decoder (12 layers, width 128, 128 tokens, vocabulary 8192, 8 samples, 6 nodes, 21 pairs)",
        "",
        "| | HVPs | passes | largest relative standard error of R, C, D, gap |",
        "|---|---|---|---|",
        f"| curvmon | {found.hvps} | **{passes:.0f}** | {', '.join(f'{100 * x:.2g} %' for x in worst)} |",
        f"| papers' protocol (timed, multiplied) | 2751 | {protocol:.0f} | |",
        f"| ratio | | **{protocol / passes:.0f}** | |",
    ]


def _gauss_newton_passes(setting: Setting, nodes: Sequence[str]) -> float:
    """The GN part alone: factors, Gram matrices and norms of all pairs, without taps and graph."""
    unit = statistics.median(setting.passes(3))
    generator = torch.Generator().manual_seed(0)
    with open_session(
        setting.model, setting.batch, loss=setting.loss, nodes=nodes, output=None, batch_dim=0, dtype=None
    ) as session:
        start = time.process_time()
        factors = gauss_newton_part(session.operator, batch_dim=0, rtol=0.05, generator=generator).factors
        for v, w in _pairs(range(len(nodes))) if factors is not None else ():  # none where T is larger than GN
            factors.norm_squared(v, w)
        return (time.process_time() - start) / unit


def _whole_passes(setting: Setting, nodes: Sequence[str]) -> float:
    unit = statistics.median(setting.passes(3))
    start = time.process_time()
    curvmon.measure(setting.model, setting.batch, loss=setting.loss, nodes=nodes)
    return (time.process_time() - start) / unit


def _resnet_nodes(count: int) -> list[str]:
    """All from the first to the last block, so that the same part of the network is differentiated."""
    blocks = [f"layer{stage}.{i}" for stage in range(1, 5) for i in range(2)]
    every = [node for block in blocks for node in (f"{block}.conv1", f"{block}.conv2", block)]
    return [every[round(i * 23 / (count - 1))] for i in range(count)]


def _decoder_nodes(count: int) -> list[str]:
    every = [f"layers.{i}{part}" for i in range(12) for part in (".out", "")]
    return [every[round(i * 23 / (count - 1))] for i in range(count)]


def _medians(rounds: list[list[float]]) -> list[float]:
    """Of each column; a round takes all sizes in turn, so that a slow moment of the machine does not favour one."""
    return [statistics.median(column) for column in zip(*rounds)]


def scaling(data: Path | None) -> Lines:
    counts = (3, 6, 12, 24)
    resnet = Setting(resnet18(seed=42, cifar_stem=True).eval(), batch(data), classification_loss)
    language = Setting(Decoder(), torch.randint(8192, (8, 129)), next_token_loss)
    rows = {
        "ResNet-18 ReLU, GN part (median of 3)": _medians(
            [[_gauss_newton_passes(resnet, _resnet_nodes(n)) for n in counts] for _ in range(3)]
        ),
        "decoder, GN part (median of 3)": _medians(
            [[_gauss_newton_passes(language, _decoder_nodes(n)) for n in counts] for _ in range(3)]
        ),
        "ResNet-18 ReLU, whole measurement (median of 3)": _medians(
            [[_whole_passes(resnet, _resnet_nodes(n)) for n in counts] for _ in range(3)]
        ),
    }
    lines = [
        "### Growth with the number of nodes (passes)",
        "",
        "| nodes | 3 | 6 | 12 | 24 | 24 to 3 |",
        "|---|---|---|---|---|---|",
    ]
    for name, values in rows.items():
        cells = " | ".join(f"{value:.1f}" for value in values)
        lines.append(f"| {name} | {cells} | **{values[-1] / values[0]:.2f}** |")
    samples = (8, 16, 32, 64, 128)
    cells = []
    for count in samples:
        images = torch.randn(count, 3, 32, 32), torch.randint(10, (count,))
        cells.append(_whole_passes(Setting(resnet18(seed=42).eval(), images, classification_loss), NODES))
    lines += [
        "",
        "Samples, ResNet-18 ReLU with the ImageNet stem, passes of the same batch: "
        + ", ".join(f"{n}: {cell:.1f}" for n, cell in zip(samples, cells)),
        "",
    ]
    cells = []
    for outputs in (10, 100, 1000, 8192):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(64, 512),
            nn.ReLU(),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, outputs),
        )
        data_ = torch.randn(32, 64), torch.randint(outputs, (32,))
        cells.append((outputs, Setting(model, data_, classification_loss).measure(["0", "2", "4"])))
    lines.append(
        "Outputs, ReLU perceptron of width 512, three nodes: "
        + ", ".join(f"{n}: {cost:.0f} passes, R ± {_relative(m):.1g} %" for n, (m, cost) in cells)
    )
    return lines


def _relative(found: curvmon.Measurement) -> float:
    return 100 * float((found.stderr["resonance"] / found.resonance).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--write", type=Path)
    parts: dict[str, Callable[[], Lines]] = {
        "relu": lambda: resnet_relu(arguments.data),
        "scaling": lambda: scaling(arguments.data),
        "gelu": gelu,
        "decoder": decoder,
        "silu": lambda: resnet_silu(arguments.data),
    }
    parser.add_argument("--only", default=",".join(parts), help=f"of {', '.join(parts)}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = ["# Cost of measuring pairs of layers", "", measured_on("speed")]
    lines += ["What the columns mean: [cost and tuning](cost.md#pairs-of-layers).", ""]
    for part in arguments.only.split(","):
        found = parts[part]()
        print("\n".join(found), flush=True)
        lines += [*found, ""]
        if arguments.write:
            arguments.write.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
