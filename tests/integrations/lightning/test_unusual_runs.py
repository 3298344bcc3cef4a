"""Runs that begin or validate in unusual ways: lazy modules, empty loaders, no sanity check, anomaly detection."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import curvmon
from curvmon import CurvatureMonitor
from curvmon.reporting.console import summary
from tests.helpers.lightning_runs import QUIET, assert_same, trained
from tests.helpers.module_zoo import BATCH, REGRESSION, REGRESSION_VAL, Regression, regression_loss


def loaders(val: Any = REGRESSION_VAL) -> tuple[Any, Any]:
    return DataLoader(REGRESSION, BATCH), DataLoader(val, BATCH)


class Lazy(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(7), nn.Tanh(), nn.LazyLinear(2))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])


@pytest.mark.parametrize("sanity", [0, 2])
@pytest.mark.parametrize("options", [{}, {"every_n_train_steps": 2}])
def test_lazy_modules_are_measured_once_they_have_parameters(sanity: int, options: Any) -> None:
    module, monitor = Lazy(), CurvatureMonitor(eigenvalues=1, **options)
    said = trained(module, monitor, loaders(), max_epochs=2, num_sanity_val_steps=sanity)
    expected = ["curvmon: not measured before the first step: lazy modules get their parameters in it"]
    assert said == ([] if sanity else expected)
    assert monitor.history and (monitor.snapshots[0].step == 0) == bool(sanity)
    assert len(monitor.history) == (2 if not options else len(loaders()[0])) + bool(sanity)


class Empty(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> Any:
        raise IndexError


@pytest.mark.parametrize("val", [[], Empty()], ids=["list", "dataset"])
def test_empty_validation_loader_counts_as_none(val: Any) -> None:
    torch.manual_seed(0)
    module, monitor = Regression(), CurvatureMonitor(eigenvalues=0)
    both = (DataLoader(REGRESSION, BATCH), val if isinstance(val, list) else DataLoader(val, BATCH))
    assert not trained(module, monitor, both, max_epochs=3)
    assert [s.epoch for s in monitor.snapshots] == [0, 0, 1, 2]
    rows = [torch.stack(column[:BATCH]) for column in zip(*REGRESSION)]
    assert_same(monitor.history[-1], curvmon.measure(module, rows, loss=regression_loss))


def test_training_batch_instead_of_a_validation_batch_is_noted() -> None:
    note = "measured on the first training batch: there was no validation batch yet"
    for sanity, data, noted in ((0, "val", True), (2, "val", False), (0, "train", False)):
        monitor = CurvatureMonitor(eigenvalues=0, data=data)
        assert not trained(Regression(), monitor, loaders(), num_sanity_val_steps=sanity)
        assert [note in found.notes for found in monitor.history] == [noted] * 2


def test_memory_notes_keep_the_note_on_the_training_batch() -> None:
    class Hungry(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if not self.training and len(batch[0]) > 4:
                raise MemoryError
            return super().training_step(batch, batch_idx)

    monitor = CurvatureMonitor(eigenvalues=0, initial=False)
    assert not trained(Hungry(), monitor, (DataLoader(REGRESSION, BATCH), None))
    (found,) = monitor.history
    assert found.notes[:2] == (
        "measured on the first training batch: there was no validation batch yet",
        "out of memory: measured on the first 4 samples of the batch",
    )


def test_anomaly_detection_does_not_see_the_measurement() -> None:
    class Classifier(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self(batch[0]), batch[1].argmax(1))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = CurvatureMonitor()
        pl.Trainer(callbacks=[monitor], detect_anomaly=True, **QUIET).fit(Classifier(), *loaders())
    assert len(monitor.history) == 2 and not torch.is_anomaly_enabled()
    assert not [w for w in caught if "Error detected in" in str(w.message)]


def test_overhead_is_nan_before_training() -> None:
    monitor = CurvatureMonitor(eigenvalues=0)
    trained(Regression(), monitor, loaders())
    first, last = monitor.snapshots
    assert math.isnan(first.overhead) and last.overhead > 0
    assert "overhead" not in summary(first) and "overhead" in summary(last)


# ---- rows that are several for a sample ----


def nt_xent(z: Tensor) -> Tensor:
    z = F.normalize(z, dim=-1)
    similarity = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    return F.cross_entropy(similarity, torch.arange(len(z)).roll(len(z) // 2))


def of_views(net: nn.Module, batch: Any) -> Tensor:
    return nt_xent(net(torch.cat([batch[0], batch[0] + 0.1])))


def test_layers_with_several_rows_per_sample_are_chosen() -> None:
    """Their widths equal to the number of samples do not matter; the numbers are those of the same nodes by name."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 8))
    batch = (torch.randn(8, 6), torch.randn(8))
    found = curvmon.measure(net, batch, loss=of_views)
    assert found.nodes == ("0", "2", "4")
    assert [note for note in found.notes if "entries along" in note] == [
        "0, 2, 4: 16 entries along batch_dim=0, where the batch has 8 samples; a perturbation is shared by all 16"
    ]
    exact = curvmon.exact(net, batch, loss=of_views, nodes=["0", "2", "4"])
    assert ((found.resonance - exact.resonance).abs() <= 4 * found.stderr["resonance"] + 1e-5 * exact.resonance).all()


def test_layers_with_one_row_per_sample_are_preferred() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.views = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 5))
            self.head = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.views(torch.cat([x, x + 0.1])).unflatten(0, (2, -1)).mean(0))

    torch.manual_seed(0)
    batch = torch.randn(8, 6), torch.randn(8, 1)
    found = curvmon.measure(Both(), batch, loss=lambda m, b: F.mse_loss(m(b[0]), b[1]))
    assert found.nodes == ("head.0", "head.2")


@pytest.mark.parametrize(("samples", "steps"), [(4, 8), (1, 6)], ids=["a multiple", "one sample"])
def test_time_steps_are_not_mistaken_for_samples(samples: int, steps: int) -> None:
    """Sequence-first inside: 8 steps of 4 samples are not two rows of each sample."""

    class SequenceFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))

        def loss(self, batch: Any) -> Tensor:
            return F.mse_loss(self.inner(batch[0].transpose(0, 1)).mean(0), batch[1])

    torch.manual_seed(0)
    batch = torch.randn(samples, steps, 3), torch.randn(samples, 2)
    with pytest.raises(curvmon.NodeError, match="no module with parameters returned a floating tensor with the batch"):
        curvmon.measure(SequenceFirst(), batch, loss=lambda m, b: m.loss(b))
