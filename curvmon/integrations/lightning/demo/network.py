"""What the demo trains: a small ResNet, on handwritten digits."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, activation: type[nn.Module]) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            activation(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = inputs == outputs and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.activation(self.branch(x) + self.skip(x))
        return output


class ResNet(nn.Module):
    """Three stages of two blocks, each stage twice as wide and half as large as the one before."""

    def __init__(self, channels: int, classes: int, width: int, activation: type[nn.Module]) -> None:
        super().__init__()
        stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.stem = nn.Sequential(stem, nn.BatchNorm2d(width), activation())
        self.layer1 = nn.Sequential(Block(width, width, 1, activation), Block(width, width, 1, activation))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2, activation), Block(2 * width, 2 * width, 1, activation))
        self.layer3 = nn.Sequential(
            Block(2 * width, 4 * width, 2, activation), Block(4 * width, 4 * width, 1, activation)
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.stem(x))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Classifier(pl.LightningModule):
    """Nothing in here knows of curvmon."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__()
        self.model, self.lr = model, lr

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self.model(images)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True)
        self.log("val_accuracy", (logits.argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, weight_decay=5e-4)


def digits() -> list[Tensor]:
    """x_train, y_train, x_test, y_test of 1797 grey images of 8 x 8 pixels."""
    data = importlib.import_module("sklearn.datasets").load_digits()  # by name: the package has no types
    x, y = torch.tensor(data.images).unsqueeze(1), torch.tensor(data.target)
    return [x[:1500], y[:1500], x[1500:], y[1500:]]


def prepared(arrays: Sequence[Tensor]) -> tuple[TensorDataset, TensorDataset]:
    """For training and for validation; every channel with mean 0 and variance 1."""
    x_train, y_train, x_test, y_test = arrays
    std, mean = torch.std_mean(x_train.float(), (0, 2, 3), keepdim=True)
    return (
        TensorDataset((x_train.float() - mean) / std, y_train.long()),
        TensorDataset((x_test.float() - mean) / std, y_test.long()),
    )
