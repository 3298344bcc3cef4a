"""The progress bar of the console: for long measurements, and none for short ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import RichProgressBar, TQDMProgressBar

from curvmon import CurvatureMonitor
from curvmon.reporting import console as module
from tests.helpers.lightning_smoke import module_of


def fit(bar: Any, monitor: CurvatureMonitor) -> None:
    torch.manual_seed(0)
    callbacks = [monitor] if bar is None else [monitor, bar]
    trainer = pl.Trainer(
        max_epochs=1, callbacks=callbacks, logger=False, enable_checkpointing=False, enable_model_summary=False,
        enable_progress_bar=bar is not None, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(module_of(pl)())


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(kind, products) of every bar that was shown and closed."""
    found: list[tuple[str, int]] = []
    for kind in (module._Rich, module._Tqdm):

        class Watched(kind):  # type: ignore[misc, valid-type]
            products = 0

            def advance(self, products: int) -> None:
                self.products += products
                super().advance(products)

            def close(self, name: str = kind.__name__) -> None:
                super().close()
                found.append((name, self.products))

        monkeypatch.setattr(module, kind.__name__, Watched)
    return found


@pytest.mark.parametrize(("bar", "kind"), [(RichProgressBar, "_Rich"), (TQDMProgressBar, "_Tqdm")])
def test_long_measurement_has_a_progress_bar(
    bar: Any, kind: str, opened: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DELAY", 0.0)
    monitor = CurvatureMonitor(eigenvalues=2, heatmaps=False)
    fit(bar(), monitor)
    # the first measurement is before Rich has its display, or not, depending on the version
    assert opened and {name for name, _ in opened} == {kind}
    spent = [snapshot.hvps for snapshot in monitor.snapshots]
    # what factors and certificate take is not told of
    assert all(0 < products <= most for (_, products), most in zip(reversed(opened), reversed(spent)))


def test_short_measurement_has_no_progress_bar(opened: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: 0.0))  # no time passes
    fit(TQDMProgressBar(), CurvatureMonitor(eigenvalues=1, heatmaps=False))
    assert opened == []


def test_no_progress_bar_without_lightnings(opened: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DELAY", 0.0)
    fit(None, CurvatureMonitor(eigenvalues=1, heatmaps=False))
    assert opened == []


def test_failing_progress_bar_costs_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise OSError("no terminal")

    monkeypatch.setattr(module, "DELAY", 0.0)
    monkeypatch.setattr(module._Tqdm, "open", broken)
    monitor = CurvatureMonitor(eigenvalues=1, heatmaps=False)
    fit(TQDMProgressBar(), monitor)
    assert len(monitor.history) == 2
