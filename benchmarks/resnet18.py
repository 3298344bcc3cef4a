"""The first paper's ResNet-18 at initialisation: R(d) and C(d) on 32 CIFAR-10 test images, against its table.

    python -m benchmarks.resnet18 --data cifar10_subset.npz          the paper's images (arrays x_test, y_test)
    python -m benchmarks.resnet18                                    random images, to see the cost alone

Reports the cost in forward+backward passes of the same batch, measured in the same run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvmon
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="npz file with x_test (uint8, N x 3 x 32 x 32) and y_test")
    parser.add_argument("--seeds", type=int, default=5, help="networks, seeds 42, 43, …")
    parser.add_argument(
        "--cifar-stem", action="store_true", help="3x3 stem without pooling; nodes up to 65,536 entries"
    )
    arguments = parser.parse_args()
    data = batch(arguments.data)
    for name, activation in ACTIVATIONS.items():
        found, passes = [], []
        for seed in range(42, 42 + arguments.seeds):
            model = resnet18(activation=activation, seed=seed, cifar_stem=arguments.cifar_stem).eval()
            found.append(curvmon.measure(model, data, loss=loss, nodes=NODES))
            passes.append(found[-1].seconds / seconds_per_pass(model, data))
        print(f"\n{name}: {found[-1].hvps} products, {sum(passes) / len(passes):.0f} forward+backward passes")
        print("d   R          paper    C      paper  D     gap")
        means = {
            m: torch.stack([x.by_distance(m) for x in found]).mean(0)
            for m in ("resonance", "coupling", "stable_rank", "gn_gap")
        }
        for d in range(len(NODES)):
            r, c, rank, gap = (means[m][d].item() for m in means)
            reference = PAPER[name]["resonance"][d], PAPER[name]["coupling"][d]
            print(f"{d}   {r:.2e}   {reference[0]:.1e}  {c:.2f}   {reference[1]:.2f}   {rank:.2f}  {gap:.2g}")


if __name__ == "__main__":
    main()
