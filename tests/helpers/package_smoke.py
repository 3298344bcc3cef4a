"""Does an installed curvmon work with what it requires and nothing more? `python smoke.py`, outside the checkout.

Run by `.ci/release` in a fresh environment; needs none of the optional packages and no other file of the tests.
"""

from __future__ import annotations

import tempfile
import warnings
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvmon


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3))

    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", F.cross_entropy(self.model(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def main() -> None:
    home = Path(curvmon.__file__).parent
    assert "site-packages" in home.parts, f"not the installed package: {home}"
    assert (home / "py.typed").exists()
    assert version("curvmon") == curvmon.__version__

    torch.manual_seed(0)
    module, x = Classifier(), torch.randn(64, 6)
    batch = x, x[:, :3].argmax(1)
    found = curvmon.measure(module.model, batch, loss=loss)
    exact = curvmon.exact(module.model, batch, loss=loss)
    error = (found.resonance - exact.resonance).abs()
    assert (error <= 5 * found.stderr["resonance"] + 1e-5 * exact.resonance).all()
    assert curvmon.spectrum(module.model, batch, loss=loss, k=2).converged.all()

    loader = DataLoader(TensorDataset(*batch), batch_size=16)
    monitor = curvmon.CurvatureMonitor(max_overhead=None)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logger = CSVLogger(folder)
        trainer = pl.Trainer(
            max_epochs=2, callbacks=[monitor], logger=logger, accelerator="cpu", enable_progress_bar=False
        )
        trainer.fit(module, loader, loader)
        columns = Path(logger.log_dir, "metrics.csv").read_text().splitlines()[0]
        assert len(curvmon.load_history(logger.log_dir).snapshots) == 3
    assert 'id="charts"' in monitor.report()  # with the files of the page, which are no modules
    assert len(monitor.history) == 3 and "curvmon/lambda_1" in columns and "curvmon_distance/coupling/1" in columns
    missing = find_spec("matplotlib") is None
    assert any("need matplotlib" in str(warning.message) for warning in caught) == missing
    print(f"curvmon {curvmon.__version__}, torch {torch.__version__}, {'no ' if missing else ''}matplotlib: ok")


if __name__ == "__main__":
    main()
