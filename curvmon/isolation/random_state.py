"""The global random generators: saved, seeded, restored."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def random_state(seed: int) -> Iterator[None]:
    """Seed the generators of Python, numpy and torch (all devices in use); restore their states on exit."""
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    accelerators = _initialized_accelerators()
    torch_state = torch.default_generator.get_state()
    device_states = [module.get_rng_state_all() for module in accelerators]
    mps_state = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    try:
        reseed(seed)
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        torch.default_generator.set_state(torch_state)
        for module, state in zip(accelerators, device_states):
            module.set_rng_state_all(state)
        if mps_state is not None:
            torch.mps.set_rng_state(mps_state)


def reseed(seed: int) -> None:
    """Seed every global generator in use, so that a model that draws noise draws the same in every forward pass.

    Not by `torch.manual_seed`, which would also queue a seed for devices that are not initialised yet.
    """
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    for module in _initialized_accelerators():
        module.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


def _initialized_accelerators() -> list[Any]:
    """Only those in use: asking another for its state would initialise it."""
    accelerators: list[Any] = [torch.cuda, torch.xpu]
    return [module for module in accelerators if module.is_initialized()]
