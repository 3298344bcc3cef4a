"""The first paper's ResNet-18 at initialisation: R(d) and C(d) on 32 CIFAR-10 test images, against its table.

    python -m benchmarks.resnet18 --data cifar10_subset.npz          the paper's images (arrays x_test, y_test)
    python -m benchmarks.resnet18                                    random images, to see the cost alone

Reports the cost in forward+backward passes of the same batch, measured in the same run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvmon
from curvmon.records import METRICS
from tests.helpers.resnet import resnet18

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
NODES = ["maxpool", "layer1", "layer2", "layer3", "layer4"]
# mean over pairs d apart, from the paper
PAPER = {
    "ReLU": {"resonance": [4.5e-2, 3.5e-2, 3.3e-2, 3.6e-2, 4.8e-2], "coupling": [1.00, 0.95, 0.92, 0.89, 0.82]},
    "SiLU": {"resonance": [3.0e-2, 1.0e-2, 4.2e-3, 2.1e-3, 1.2e-3], "coupling": [1.00, 0.56, 0.31, 0.17, 0.08]},
}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"ReLU": F.relu, "SiLU": F.silu}


def batch(path: Path | None) -> tuple[Tensor, Tensor]:
    if path is None:
        g = torch.Generator().manual_seed(0)
        return torch.randn(32, 3, 32, 32, generator=g), torch.randint(10, (32,), generator=g)
    import numpy as np

    data = np.load(path)
    x = torch.from_numpy(data["x_test"][:32]).float() / 255
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (MEAN, STD))
    return (x - mean) / std, torch.from_numpy(data["y_test"][:32]).long()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def seconds_per_pass(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        loss(model, data).backward()
        times.append(time.perf_counter() - start)
    return min(times)


def measurements(
    activation: str, data: tuple[Tensor, Tensor], seeds: int, cifar_stem: bool = False
) -> Iterator[tuple[curvmon.Measurement, float]]:
    """Of the networks with seeds 42, 43, ...: the measurement, and how many passes it took."""
    for seed in range(42, 42 + seeds):
        model = resnet18(activation=ACTIVATIONS[activation], seed=seed, cifar_stem=cifar_stem).eval()
        found = curvmon.measure(model, data, loss=loss, nodes=NODES)
        yield found, found.seconds / seconds_per_pass(model, data)


def by_distance(measured: Sequence[curvmon.Measurement]) -> dict[str, Tensor]:
    """Means over networks, and over the pairs d = 0, 1, ... apart."""
    return {m: torch.stack([each.by_distance(m) for each in measured]).mean(0) for m in METRICS}


def mean_metrics(activation: str, path: Path | None, seeds: int) -> dict[str, Tensor]:
    return by_distance([found for found, _ in measurements(activation, batch(path), seeds)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="npz file with x_test (uint8, N x 3 x 32 x 32) and y_test")
    parser.add_argument("--seeds", type=int, default=5, help="networks, seeds 42, 43, …")
    parser.add_argument(
        "--cifar-stem", action="store_true", help="3x3 stem without pooling; nodes up to 65,536 entries"
    )
    arguments = parser.parse_args()
    data = batch(arguments.data)
    for name in ACTIVATIONS:
        found, passes = zip(*measurements(name, data, arguments.seeds, arguments.cifar_stem))
        print(f"\n{name}: {found[-1].hvps} HVPs, {sum(passes) / len(passes):.0f} forward+backward passes")
        print("d   R          paper    C      paper  D     gap")
        means = by_distance(found)
        for d in range(len(NODES)):
            r, c, rank, gap = (means[m][d].item() for m in means)
            reference = PAPER[name]["resonance"][d], PAPER[name]["coupling"][d]
            print(f"{d}   {r:.2e}   {reference[0]:.1e}  {c:.2f}   {reference[1]:.2f}   {rank:.2f}  {gap:.2g}")


if __name__ == "__main__":
    main()
