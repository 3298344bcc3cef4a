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


@packages
def test_validation_metrics(package: Any) -> None:
    """Of this validation, over all batches; none of the training epoch, and none outside of a validation."""
    seen: list[dict[str, float]] = []

    class Module(module_of(package)):  # type: ignore[misc]
        def training_step(self, batch: Any, index: int) -> Any:
            self.log("train_loss", 7.0)
            return super().training_step(batch, index)

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", float(index + 10 * self.current_epoch))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    class Look(package.Callback):  # type: ignore[misc]
        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            seen.append(compatibility.validation_metrics(trainer))
            rates.append(compatibility.scheduled_rate(trainer))

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            assert compatibility.validation_metrics(trainer) == {}

    rates: list[float | None] = []
    options = {**QUIET, "max_epochs": 2, "limit_val_batches": 3, "callbacks": [Look()], "num_sanity_val_steps": 0}
    package.Trainer(**options).fit(Module())
    assert seen == [{"val_loss": 1.0}, {"val_loss": 11.0}]
    assert rates == pytest.approx([0.01, 0.001])  # already those of the next epoch
