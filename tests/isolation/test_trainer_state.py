"""What a step can change through its Trainer (stage, learning rates, schedules, counters) is frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from curvmon import CurvatureMonitor
from tests.helpers.lightning_runs import QUIET
from tests.helpers.module_zoo import BATCH, REGRESSION, REGRESSION_VAL, Regression
from tests.helpers.state_differences import differences, flattened


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.drawn = 0

    def train_dataloader(self) -> Any:
        return DataLoader(REGRESSION, BATCH)

    def val_dataloader(self) -> Any:
        return DataLoader(REGRESSION_VAL, BATCH)


class Scheduled(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)]


def sets_learning_rate(self: Any, loss: Tensor) -> Tensor:
    for group in self.optimizers().param_groups:
        group["lr"] *= 0.9
    return loss


def steps_schedule(self: Any, loss: Tensor) -> Tensor:
    self.lr_schedulers().step()
    return loss


def zeroes_gradients(self: Any, loss: Tensor) -> Tensor:
    if not self.training:  # as if it were due in the middle of an accumulation
        self.optimizers().zero_grad()
    return loss


def counts_on_the_trainer(self: Any, loss: Tensor) -> Tensor:
    self.trainer.steps_seen = getattr(self.trainer, "steps_seen", 0) + 1
    return loss * (1 + 0.1 * self.trainer.steps_seen)


def counts_on_the_datamodule(self: Any, loss: Tensor) -> Tensor:
    self.trainer.datamodule.drawn += 1
    return loss * (1 + 0.1 * self.trainer.datamodule.drawn)


def ends_training(self: Any, loss: Tensor) -> Tensor:
    if not self.training:  # as if the loss of the probe batch were small enough
        self.trainer.should_stop = True
    return loss


def is_for_training(self: Any, loss: Tensor) -> Tensor:
    if not self.trainer.training or self.trainer.validating:
        raise RuntimeError("not in training")
    return loss


REACHES = (
    sets_learning_rate,
    steps_schedule,
    zeroes_gradients,
    counts_on_the_trainer,
    counts_on_the_datamodule,
    ends_training,
    is_for_training,
)


def run(reach: Callable[[Any, Tensor], Tensor], *watchers: pl.Callback) -> dict[str, Any]:
    class Module(Scheduled):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return reach(self, super().training_step(batch, batch_idx))

    torch.manual_seed(0)
    module, data = Module(), Data()
    options = {**QUIET, "max_epochs": 3, "accumulate_grad_batches": 2, "val_check_interval": 1}
    trainer = pl.Trainer(callbacks=list(watchers), **options)
    trainer.fit(module, datamodule=data)
    return flattened(
        weights=list(module.parameters()),
        optimizer=trainer.optimizers[0].state_dict(),
        own=sorted(trainer.optimizers[0].__dict__),
        schedule={k: v for k, v in trainer.lr_scheduler_configs[0].scheduler.__dict__.items() if k != "optimizer"},
        counters=(trainer.global_step, getattr(trainer, "steps_seen", None), data.drawn, trainer.should_stop),
    )


@pytest.mark.parametrize("reach", REACHES, ids=lambda reach: reach.__name__)
def test_training_is_unchanged(reach: Any, recwarn: pytest.WarningsRecorder) -> None:
    monitor = CurvatureMonitor(eigenvalues=1, probe_size=8, metrics=["resonance"], every_n_train_steps=1)
    assert not differences(run(reach), run(reach, monitor))
    assert len(monitor.history) > 3
    assert not [w for w in recwarn if "curvmon" in str(w.message)]


@pytest.mark.parametrize("wrapped", [True, False])
def test_step_that_steps_its_optimizer_is_refused(wrapped: bool) -> None:
    def steps(self: Any, loss: Tensor) -> Tensor:
        if not self.training:
            self.optimizers(use_pl_optimizer=wrapped).step()
        return loss

    monitor = CurvatureMonitor(probe_size=8)
    alone = run(steps)
    with pytest.warns(UserWarning, match="steps its optimizer, which a measurement must not; pass loss=") as record:
        assert not differences(alone, run(steps, monitor))
    assert len([w for w in record if "curvmon" in str(w.message)]) == 1 and not monitor.history


def test_stop_requested_during_measurement_is_kept() -> None:
    """A signal handler may set it in the seconds that a measurement takes."""

    class Stopping(CurvatureMonitor):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            super().on_train_batch_start(trainer, *args)  # the measurement before the first step
            trainer.should_stop = True

    def loss(module: Any, batch: Any) -> Tensor:
        module.trainer.should_stop = True  # not by the step
        return Regression.training_step(module, batch, 0)

    for monitor in (Stopping(), CurvatureMonitor(loss=loss)):
        torch.manual_seed(0)
        trainer = pl.Trainer(callbacks=[monitor], **{**QUIET, "max_epochs": 5})
        trainer.fit(Regression(), datamodule=Data())
        assert trainer.current_epoch == 1


def test_module_reads_the_training_stage() -> None:
    seen = []

    class Curious(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if not self.training:
                seen.append((self.trainer.training, self.trainer.sanity_checking, self.optimizers() is not None))
            return super().training_step(batch, batch_idx)

    monitor = CurvatureMonitor(eigenvalues=0)
    trainer = pl.Trainer(callbacks=[monitor], **QUIET)
    trainer.fit(Curious(), datamodule=Data())
    assert len(monitor.history) == 2 and set(seen) == {(True, False, True)}
    trainer.validate(Curious(), datamodule=Data(), verbose=False)
    assert trainer.state.stage is None
