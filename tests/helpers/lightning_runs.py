"""Runs of a Trainer that prints nothing and writes nothing, with what the monitor warned of; and their checkpoints."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import curvmon
from curvmon import CurvatureMonitor
from curvmon.records import METRICS
from tests.helpers.module_zoo import BATCH, REGRESSION, REGRESSION_VAL, Regression

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def trained(module: Any, monitor: CurvatureMonitor, loaders: Any, **options: Any) -> list[str]:
    """Fit to the end; what the monitor warned of."""
    trainer = pl.Trainer(callbacks=[monitor], **{**QUIET, **options})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, *loaders)
    assert trainer.state.finished and trainer.current_epoch == trainer.max_epochs
    assert trainer.num_training_batches == len(loaders[0]) > 1
    return [str(w.message) for w in caught if str(w.message).startswith("curvmon: ")]


def assert_same(found: curvmon.Measurement, wanted: curvmon.Measurement) -> None:
    assert found.nodes == wanted.nodes
    for metric in METRICS:
        ours, theirs = getattr(found, metric), getattr(wanted, metric)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0, equal_nan=True, msg=lambda m, k=metric: f"{k}: {m}")
    assert found.loss == pytest.approx(wanted.loss, rel=1e-6)


def seeded(make: type[Any] = Regression, *args: Any) -> Any:
    torch.manual_seed(0)
    return make(*args)


def first_rows(count: int) -> list[Tensor]:
    """The first validation samples, as a batch."""
    return [torch.stack(column[:count]) for column in zip(*REGRESSION_VAL)]


def run(
    monitors: Any,
    *,
    epochs: int,
    ckpt: Any = None,
    save: Path | None = None,
    val: Any = REGRESSION_VAL,
    module: type[Any] = Regression,
    collate: Any = None,
    keep: list[Any] | None = None,
    **options: Any,
) -> list[str]:
    """Fit `module` from seed 0, from a checkpoint if there is one; what the monitors warned of."""
    monitors = monitors if isinstance(monitors, list) else [monitors]
    trainer = pl.Trainer(callbacks=monitors, **{**QUIET, "max_epochs": epochs, **options})
    trainee = seeded(module)
    if keep is not None:
        keep.append(trainee)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(
            trainee,
            DataLoader(REGRESSION, BATCH),
            None if val is None else DataLoader(val, BATCH, collate_fn=collate),
            ckpt_path=ckpt,
            **({} if ckpt is None else {"weights_only": True}),
        )
    if save is not None:
        trainer.save_checkpoint(save)
    return [str(w.message) for w in caught if str(w.message).startswith("curvmon: ")]


def doctored(path: Path, **changes: Any) -> Path:
    """The checkpoint with other values in the monitor's state."""
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["callbacks"]["CurvatureMonitor"].update(changes)
    other = path.with_name("doctored.ckpt")
    torch.save(checkpoint, other)
    return other
