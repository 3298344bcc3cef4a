"""Modules whose networks, metrics, logs or optimizers move something besides the weights, and train in no time."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

Batch = Any


class Plain(pl.LightningModule):
    """The least that a user writes; subclasses change one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module = self.network()

    def network(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class BatchNorm(Plain):
    def network(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


class Dropout(Plain):
    def network(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


class MixedFlags(Dropout):
    """A user keeps part of the network in eval mode while the rest trains."""

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.net[2].eval()  # type: ignore[index]


class HookedSpectralNorm(Plain):
    def network(self) -> nn.Module:
        first = torch.nn.utils.spectral_norm(nn.Linear(4, 6))
        return nn.Sequential(first, nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


class ParametrizedSpectralNorm(Plain):
    def network(self) -> nn.Module:
        first = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6))
        return nn.Sequential(first, nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


class Transformer(Plain):
    def network(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, dropout=0.1, batch_first=True)
        return nn.Sequential(nn.Unflatten(1, (1, 4)), layer, nn.Flatten(), nn.Linear(4, 3))


class Checkpointed(Dropout):
    """Recomputes activations in the backward pass, with the random numbers of the forward pass."""

    def forward(self, x: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False)


class TiedWeights(Plain):
    def network(self) -> nn.Module:
        first, second = nn.Linear(6, 6), nn.Linear(6, 6)
        second.weight = first.weight
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), first, nn.Tanh(), second, nn.Tanh(), nn.Linear(6, 3))


class InPlaceBatch(Plain):
    """The step scribbles on its batch."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        batch[0].mul_(1.5).add_(torch.rand(()))
        return super().training_step(batch, batch_idx)


class MomentumEncoder(Plain):
    """The step moves the weights of a teacher that no optimizer knows."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = self.network().requires_grad_(False)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        with torch.no_grad():
            for ours, theirs in zip(self.teacher.parameters(), self.net.parameters()):
                ours.lerp_(theirs, 0.1)
        out = self(batch[0])
        return F.cross_entropy(out, batch[1]) + F.mse_loss(out, self.teacher(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class GradientPenalty(Plain):
    """The step differentiates by itself, by inputs and by parameters."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x = batch[0].clone().requires_grad_()
        loss = F.cross_entropy(self(x), batch[1])
        (by_input,) = torch.autograd.grad(loss, x, create_graph=True)
        (by_weight,) = torch.autograd.grad(loss, self.net[0].weight, create_graph=True)  # type: ignore[index]
        return loss + by_input.pow(2).sum() + by_weight.pow(2).sum()


class Recurrent(Plain):
    """A state that is carried from one batch to the next."""

    def network(self) -> nn.Module:
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.state: Any = None
        return nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        out, state = self.lstm(x.unsqueeze(1), self.state if self.training else None)
        self.state = tuple(part.detach() for part in state)
        return self.net(out[:, -1])


class MetricAttribute(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)
        self.mean = MeanMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        out = self(batch[0])
        loss = F.cross_entropy(out, batch[1])
        self.accuracy(out, batch[1])
        self.mean.update(loss.detach())
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", self.mean.compute())
        self.mean.reset()


class MetricModuleDict(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.metrics = nn.ModuleDict({"accuracy": MulticlassAccuracy(3), "f1": MulticlassF1Score(3)})
        self.collection = MetricCollection({"a": MulticlassAccuracy(3), "b": MulticlassAccuracy(3, top_k=2)})

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        out = self(batch[0])
        for name, metric in self.metrics.items():
            metric(out, batch[1])
            self.log(name, metric)  # type: ignore[arg-type]
        self.log_dict(self.collection(out, batch[1]), on_step=True)
        return F.cross_entropy(out, batch[1])


class MetricList(Plain):
    """Hidden from `modules()`."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = [MulticlassAccuracy(3), MeanMetric()]

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        out = self(batch[0])
        loss = F.cross_entropy(out, batch[1])
        self.metrics[0].update(out, batch[1])
        self.metrics[1](loss.detach())
        return loss


class MetricUpdatedLate(Plain):
    """A metric that is logged in the steps and gets its last samples when the epoch ends."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.late_train = MeanMetric(), MeanMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.late_train.update(loss.detach())
        self.log("late_train", self.late_train, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.late.update(F.cross_entropy(self(batch[0]), batch[1]))
        self.log("late", self.late)

    def on_validation_epoch_end(self) -> None:
        self.late.update(100.0)

    def on_train_epoch_end(self) -> None:
        self.late_train.update(100.0)


class Logs(Plain):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("batch_idx", float(batch_idx), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log_dict({"a": loss * 2, "b": torch.tensor(1.0)}, prog_bar=True)
        return {"loss": loss, "extra": loss.detach()}


class LogsToExperiment(Plain):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        assert self.logger is not None
        self.logger.experiment.add("loss", loss.item(), self.global_step)  # type: ignore[attr-defined]
        self.logger.log_metrics({"by hand": loss.item()}, step=self.global_step)
        for logger in self.loggers:
            logger.experiment.add("all")  # type: ignore[attr-defined]
        for logger in self.trainer.loggers:
            logger.log_metrics({"trainer": 1.0}, step=0)
        return loss


class KeepsItsLogger(Plain):
    """The logger's experiment, held by the module itself."""

    writer: Any = None

    def on_fit_start(self) -> None:
        self.writer = self.logger.experiment  # type: ignore[union-attr]

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.writer.add("step", batch_idx)
        return super().training_step(batch, batch_idx)


class Compiled(Plain):
    def network(self) -> nn.Module:
        inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        compiled: Any = torch.compile(inner, backend="aot_eager")
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), compiled, nn.Linear(6, 3))


class Adam(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class ParameterGroups(Plain):
    def configure_optimizers(self) -> Any:
        first, *rest = self.net.children()
        groups = [
            {"params": first.parameters(), "lr": 0.01, "weight_decay": 0.1},
            {"params": [p for part in rest for p in part.parameters()]},
        ]
        return torch.optim.AdamW(groups, lr=0.02)


class StepSchedule(Adam):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Plateau(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
