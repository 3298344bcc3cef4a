"""No test depends on how fast the machine is or what else it does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from tests.helpers.time_limits import PATIENCE
from tests.helpers.time_limits import no_overhead_limit as without_limit

# Two test processes on two cores: more threads would only wait for each other.
torch.set_num_threads(1)
# W&B gives up when its own process takes longer to start, 30 seconds by default.
os.environ.setdefault("WANDB_INIT_TIMEOUT", str(int(PATIENCE)))
os.environ.setdefault("WANDB__SERVICE_WAIT", str(int(PATIENCE)))

DEFAULT_LIMIT = {
    "test_budget.py",  # has a clock of its own
    "test_docs.py",  # prints the signature
}


@pytest.fixture(scope="module", autouse=True)
def _no_overhead_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """Monitors never skip a measurement, unless a test sets `max_overhead`; fixtures of modules included."""
    with nullcontext() if request.path.name in DEFAULT_LIMIT else without_limit():
        yield


@pytest.fixture
def no_overhead_limit() -> Iterator[None]:
    """The same for a single test of a module that keeps the default."""
    with without_limit():
        yield
