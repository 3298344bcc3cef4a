"""Peak memory of a measurement, as the monitor makes it: at most three times that of a training step on its batch.

Counted in tensors, so exact on every machine; `python -m benchmarks.memory` measures what the process takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.networks import Decoder, next_token_loss
from curvmon.monitor.pairs_and_spectrum import measure_pairs, measure_spectrum
from curvmon.monitor.settings import Settings
from tests.helpers.live_tensors import LiveTensors, live_tensors

VOCABULARY, SAMPLES, TOKENS = 8192, 16, 32
SETTINGS = Settings()
pytestmark = pytest.mark.slow


def step(model: nn.Module, ids: Any, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        next_token_loss(model, ids).backward()
        optimizer.step()


def pairs(model: nn.Module, ids: Any, optimizer: torch.optim.Optimizer) -> None:
    measure_pairs(SETTINGS, model, [ids], next_token_loss, max_hvps=20)


def spectrum(model: nn.Module, ids: Any, optimizer: torch.optim.Optimizer) -> None:
    measure_spectrum(SETTINGS, model, [ids], next_token_loss, optimizer=optimizer)


def memory(what: Callable[..., None]) -> LiveTensors:
    """Of a decoder whose logits are its largest tensor."""
    torch.manual_seed(0)
    model = Decoder(layers=2, width=8, heads=2, tokens=TOKENS, vocabulary=VOCABULARY)
    ids = torch.randint(VOCABULARY, (SAMPLES, TOKENS + 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return live_tensors(lambda: what(model, ids, optimizer), 4 * SAMPLES * TOKENS * VOCABULARY)


@pytest.mark.parametrize(("measured", "logits"), [(pairs, 6), (spectrum, 8)])
def test_tensors_of_the_size_of_the_logits(measured: Callable[..., None], logits: int) -> None:
    """Three in a training step, with torch's own operations."""
    trained, found = memory(step), memory(measured)
    assert trained.most == 3
    assert found.most <= logits
    assert found.peak <= 3 * trained.peak
