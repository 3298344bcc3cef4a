"""Does the callback work with this Lightning? `python -m tests.helpers.lightning_smoke lightning.pytorch`

Trains a few steps with a CSV logger, resumes from the checkpoint, and builds the callback with that package's
LightningCLI. Run by `.ci/versions` in an environment for every version; not a test of its own.
"""

from __future__ import annotations

import importlib
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def module_of(lightning: Any) -> Any:
    class Classifier(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            sizes = [nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3)]
            self.model = nn.Sequential(*sizes)

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = F.cross_entropy(self.model(batch[0]), batch[1])
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", F.cross_entropy(self.model(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-2)

        def train_dataloader(self) -> Any:
            x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :3].argmax(1)), batch_size=16)

        val_dataloader = train_dataloader

    return Classifier


def main(package: str) -> None:
    lightning = importlib.import_module(package)
    loggers = importlib.import_module(f"{package}.loggers")
    cli = importlib.import_module(f"{package}.cli")
    from curvmon import CurvatureMonitor

    assert issubclass(CurvatureMonitor, lightning.Callback)
    classifier = module_of(lightning)
    quiet: dict[str, Any] = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "log_every_n_steps": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        monitor = CurvatureMonitor(eigenvalues=2, heatmaps=False, max_overhead=None)
        trainer = lightning.Trainer(max_epochs=2, callbacks=[monitor], logger=loggers.CSVLogger(folder), **quiet)
        trainer.fit(classifier())
        assert len(monitor.history) == 3 and all(m.resonance.isfinite().all() for m in monitor.history)
        assert math.isfinite(trainer.callback_metrics["curvmon/lambda_1"].item())
        assert "curvmon/lambda_1" in (Path(trainer.logger.log_dir) / "metrics.csv").read_text()
        path = Path(folder) / "run.ckpt"
        trainer.save_checkpoint(path)
        again = CurvatureMonitor(eigenvalues=2, heatmaps=False, max_overhead=None)
        lightning.Trainer(max_epochs=3, callbacks=[again], logger=False, enable_checkpointing=False, **quiet).fit(
            classifier(), ckpt_path=path
        )
        assert len(again.history) == 4
        config = Path(folder) / "config.yaml"
        config.write_text(
            f"trainer:\n  max_epochs: 1\n  logger: false\n  default_root_dir: {folder}\n  enable_progress_bar: false\n"
            "  callbacks:\n    - class_path: curvmon.CurvatureMonitor\n"
            "      init_args:\n        eigenvalues: 1\n        max_overhead: null\n        nodes: ['model.*']\n"
        )
        built = cli.LightningCLI(classifier, args=["fit", "--config", str(config)], save_config_callback=None)
        (found,) = (c for c in built.trainer.callbacks if isinstance(c, CurvatureMonitor))
        assert len(found.history) == 2
    print(f"{package} {lightning.__version__}, torch {torch.__version__}: ok")


if __name__ == "__main__":
    main(sys.argv[1])
