"""The global random generators: saved, seeded, restored; and draws that leave them alone."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def random_state(seed: int) -> Iterator[None]:
    """Seed python, numpy and torch (all devices in use) inside, restore their states on exit."""
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
    """Seed every global generator in use, so that a model with noise of its own draws the same in every forward pass.

    Not `torch.manual_seed`: that queues a seed for devices that are not initialised yet, a trace.
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
    """Only those that already run: asking a sleeping device for its state would wake it up."""
    accelerators: list[Any] = [torch.cuda, torch.xpu]
    return [module for module in accelerators if module.is_initialized()]
