"""Two gloo processes and one event: `python -m tests.helpers.alert_ddp_run FOLDER`. Not a test itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import TensorBoardLogger

from curvmon import Alert, AlertRules, CurvatureMonitor
from tests.helpers.ddp_run import Lit, samples

EPOCHS, AT = 12, 9


class ScaleWeights(pl.Callback):
    """All weights of one layer grow fivefold."""

    @torch.no_grad()
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == AT:
            next(module.parameters()).mul_(5.0)


def main(folder: Path) -> None:
    called: list[Alert] = []
    monitor = CurvatureMonitor(
        eigenvalues=1,
        max_overhead=None,
        heatmaps=False,
        alerts=AlertRules(edge_of_stability=None, coupling_above=None),
        on_alert=called.append,
    )
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=TensorBoardLogger(folder, name="", version="tb"),
        callbacks=[monitor, ScaleWeights()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader
    trainer.fit(Lit("silu"), loader(samples(64, 0), 16), loader(samples(32, 1), 16))
    torch.save(
        {"alerts": [alert.to_dict() for alert in monitor.alerts], "called": len(called)},
        folder / f"rank{trainer.global_rank}.pt",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
