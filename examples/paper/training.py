"""The first paper's training: cosine schedule, batches of 128, clipped gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.paper.data import Images, normalised

Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def mean_squared_error(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def train_on_images(model: nn.Module, images: Images, epochs: int, seed: int) -> float:
    """SGD with learning rate 0.01 on the training images; returns the accuracy on the test images."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    for _ in training(model, (normalised(images.x_train), images.y_train), cross_entropy, optimizer, epochs, seed):
        pass
    with torch.no_grad():
        predictions = model(normalised(images.x_test)).argmax(1)
    return (predictions == images.y_test).double().mean().item()


def training(
    model: nn.Module, data: Batch, loss: Loss, optimizer: torch.optim.Optimizer, epochs: int, seed: int
) -> Iterator[int]:
    """Batches of 128, a cosine schedule, gradients no longer than one; comes back after every epoch with its number."""
    generator = torch.Generator().manual_seed(seed)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    for epoch in range(1, epochs + 1):
        model.train()
        for chosen in torch.randperm(len(data[0]), generator=generator).split(128):
            optimizer.zero_grad()
            loss(model, (data[0][chosen], data[1][chosen])).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        schedule.step()
        model.eval()
        yield epoch
