"""Peak memory of a measurement against that of one training step, each in a process of its own.

    python -m benchmarks.memory

Reads the high-water mark of the resident set, so it runs on Linux only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import curvmon
from benchmarks.networks import Decoder, classification_loss, next_token_loss
from tests.helpers.resnet import resnet18

RESNET_NODES = ["maxpool", "layer1", "layer2", "layer3", "layer4"]
DECODER_NODES = [f"layers.{i}" for i in (1, 3, 5, 7, 9, 11)]


def _images() -> Any:
    return torch.randn(32, 3, 32, 32), torch.randint(10, (32,))


CASES: dict[str, Callable[[], tuple[nn.Module, Any, Any, list[str]]]] = {
    "ResNet-18 ReLU": lambda: (resnet18(cifar_stem=True), _images(), classification_loss, RESNET_NODES),
    "ResNet-18 SiLU": lambda: (
        resnet18(activation=F.silu, cifar_stem=True),
        _images(),
        classification_loss,
        RESNET_NODES,
    ),
    "decoder": lambda: (Decoder(), torch.randint(8192, (8, 129)), next_token_loss, DECODER_NODES),
}


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) / 1024


@contextmanager
def peak_beyond_now() -> Iterator[list[float]]:
    """When the context ends, the list holds the MiB that were taken at most, beyond what was taken at its start."""
    found: list[float] = []
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the high-water mark
    yield found
    found.append(_status("VmHWM") - before)


def peak(case: str, what: str) -> float:
    """MiB beyond what model and batch take."""
    torch.manual_seed(0)
    model, batch, loss, nodes = CASES[case]()
    torch.ones(256, 256) @ torch.ones(256, 256)  # libraries take their own memory now
    with peak_beyond_now() as found:
        if what == "step":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for _ in range(2):
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
        else:
            curvmon.measure(model, batch, loss=loss, nodes=nodes)
    return found[0]


def compare(case: str) -> tuple[float, float]:
    """(training step, measurement) in MiB."""
    found = []
    for what in ("step", "measure"):
        command = [sys.executable, "-m", "benchmarks.memory", "--case", case, "--what", what]
        found.append(float(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES))
    parser.add_argument("--what", choices=["step", "measure"])
    arguments = parser.parse_args()
    if arguments.case:
        print(peak(arguments.case, arguments.what))
        return
    for case in CASES:
        step, measured = compare(case)
        print(f"{case:16} step {step:6.0f} MiB   measurement {measured:6.0f} MiB   ratio {measured / step:.2f}")


if __name__ == "__main__":
    main()
