"""The installed Lightning packages have the private names that `compatibility` lists."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning as pl
import torch

from curvmon.integrations.lightning import compatibility
from tests.helpers.lightning_runs import QUIET
from tests.helpers.lightning_smoke import module_of

packages = pytest.mark.parametrize("package", [pl, lightning.pytorch], ids=["pytorch_lightning", "lightning"])


@pytest.fixture(scope="module", params=[pl, lightning.pytorch], ids=["pytorch_lightning", "lightning"])
def fit(request: pytest.FixtureRequest) -> Any:
    """A run without a monitor."""
    module = module_of(request.param)()
    trainer = request.param.Trainer(**QUIET)
    trainer.fit(module)
    return SimpleNamespace(trainer=trainer, module=module)


def test_batches_that_stepped(fit: Any) -> None:
    assert compatibility.batches_that_stepped(fit.trainer) == fit.trainer.global_step > 0


def test_published_values_are_callback_metrics(fit: Any) -> None:
    compatibility.publish(fit.trainer, {"a/b": 0.5})
    assert fit.trainer._logger_connector._callback_metrics["a/b"] == torch.tensor(0.5)
    assert fit.trainer.callback_metrics["a/b"] == 0.5


def test_the_trainer_of_a_module(fit: Any) -> None:
    assert compatibility.attached_trainer(fit.module) is fit.trainer
    assert compatibility.attached_trainer(type(fit.module)()) is None


def test_optimizers_of_a_strategy(fit: Any) -> None:
    assert len(fit.trainer.strategy._lightning_optimizers) == len(fit.trainer.optimizers) == 1


@packages
def test_settings_of_the_wandb_logger(package: Any, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    logger = package.loggers.WandbLogger(save_dir=tmp_path, offline=True, sync_tensorboard=True)
    assert logger._wandb_init["sync_tensorboard"]


@packages
def test_steps_of_the_base_class_are_not_overridden(package: Any) -> None:
    assert not compatibility._overrides(package.LightningModule(), "training_step")
    assert compatibility._overrides(module_of(package)(), "training_step")


@packages
def test_unsupported_strategies_exist(package: Any) -> None:
    assert all(hasattr(package.strategies, name) for name in compatibility._UNSUPPORTED_STRATEGIES)
