"""Peak memory of the two parts of a measurement against that of a training step, each in a process of its own.

    python -m benchmarks.memory                                 about ten minutes
    python -m benchmarks.memory --only relu,50k                 some of the networks
    python -m benchmarks.memory --write docs/memory-table.md    keep the result

Pairs and eigenvalues as the monitor measures them, on as many samples as the training step has. Reads the high-water
mark of the resident set, so it runs on Linux only, and what the allocator keeps of freed memory counts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.header import measured_on
from benchmarks.networks import DECODER_NODES, Decoder, classification_loss, next_token_loss
from benchmarks.resnet18 import NODES
from curvmon.monitor.pairs_and_spectrum import measure_pairs, measure_spectrum
from curvmon.monitor.settings import Settings
from tests.helpers.resnet import resnet18


def _images() -> Any:
    return torch.randn(32, 3, 32, 32), torch.randint(10, (32,))


def _decoder(vocabulary: int) -> tuple[nn.Module, Any, Any, None]:
    """Whose logits are by far its largest tensor."""
    return (
        Decoder(layers=2, width=64, tokens=64, vocabulary=vocabulary),
        torch.randint(vocabulary, (32, 65)),
        next_token_loss,
        None,
    )


CASES: dict[str, tuple[str, Callable[[], tuple[nn.Module, Any, Any, list[str] | None]]]] = {
    "relu": (
        "ResNet-18 ReLU",
        lambda: (resnet18(cifar_stem=True), _images(), classification_loss, NODES),
    ),
    "silu": (
        "ResNet-18 SiLU",
        lambda: (resnet18(activation=F.silu, cifar_stem=True), _images(), classification_loss, NODES),
    ),
    "decoder": (
        "decoder, 12 blocks, 8 x 128 tokens, vocabulary 8,192",
        lambda: (Decoder(), torch.randint(8192, (8, 129)), next_token_loss, DECODER_NODES),
    ),
    "8k": ("decoder, 2 blocks, 32 x 64 tokens, vocabulary 8,192", lambda: _decoder(8192)),
    "50k": ("decoder, 2 blocks, 32 x 64 tokens, vocabulary 50,257", lambda: _decoder(50257)),
}
"""name, model, batch, loss and nodes"""
PARTS = ("step", "pairs", "spectrum")


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


def peak(case: str, part: str) -> float:
    """MiB beyond what model and batch take."""
    torch.manual_seed(0)
    model, batch, loss, nodes = CASES[case][1]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.ones(256, 256) @ torch.ones(256, 256)  # libraries take their own memory now
    with peak_beyond_now() as found:
        if part == "step":
            for _ in range(2):
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
        elif part == "pairs":
            measure_pairs(Settings(nodes=nodes), model, [batch], loss)
        else:
            measure_spectrum(Settings(), model, [batch], loss, optimizer=optimizer)
    return found[0]


def compare(case: str) -> list[float]:
    """MiB of a training step, of the pairs and of the spectrum."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.memory", "--only", case, "--part"]
    runs = [subprocess.run([*command, part], check=True, stdout=subprocess.PIPE, text=True) for part in PARTS]
    return [float(run.stdout) for run in runs]


def table(cases: Sequence[str]) -> Iterator[str]:
    yield "# Peak memory of a measurement"
    yield ""
    yield f"Beyond model and batch. {measured_on('memory')}"
    yield "What the columns mean: [cost and tuning](cost.md#memory)."
    yield ""
    yield "| network | training step | pairs | relative to the step | spectrum | relative to the step |"
    yield "|---|---|---|---|---|---|"
    for case in cases:
        step, *measured = compare(case)
        cells = " | ".join(f"{part:.0f} MiB | **{part / step:.2f}**" for part in measured)
        yield f"| {CASES[case][0]} | {step:.0f} MiB | {cells} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.part:  # in a process of its own
        print(peak(arguments.only, arguments.part))
        return
    lines = []
    for line in table(arguments.only.split(",")):
        print(line, flush=True)
        lines.append(line)
    if arguments.write:
        arguments.write.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
