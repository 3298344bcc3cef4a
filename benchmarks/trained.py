"""Trained networks on which the benchmarks of eigenvalues look, each also as it is one epoch later."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.header import cached
from benchmarks.networks import Decoder, classification_loss
from tests.helpers.resnet import resnet18

RATES = {10: 0.02, 20: 0.002, 30: 0.0002}
"""the learning rates of the epochs at which the ResNet is looked at"""
ANNEALED_EPOCHS = 30


class Setting(NamedTuple):
    """A trained network, the same one epoch later, and the batch on which both are looked at."""

    name: str
    model: nn.Module
    later: nn.Module
    batch: tuple[Tensor, Tensor]
    criterion: nn.Module

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.criterion(model(batch[0]), batch[1])


def images(data: Path | None) -> tuple[Tensor, Tensor]:
    """CIFAR-10 images and classes; without the file, made-up ones of the same form."""
    torch.manual_seed(0)
    if data is None:
        x, y = torch.randn(1024, 3, 32, 32), torch.randint(10, (1024,))
        return x + 0.5 * torch.randn(10, 3, 32, 32)[y], y
    arrays = np.load(data)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]))
    return (torch.tensor(arrays["x_train"]) / 255 - mean) / std, torch.tensor(arrays["y_train"]).long()


def trained_resnets(data: Path | None, late: bool) -> list[Setting]:
    """ResNet-18 with the ImageNet stem after ten epochs, and one later; `late`: also at lower learning rates."""
    return cached(f"ResNets, {data and data.name}, {late}", lambda: _trained_resnets(data, late))


def _trained_resnets(data: Path | None, late: bool) -> list[Setting]:
    x, y = images(data)
    model = resnet18(seed=42)
    probe = x[:32].clone(), y[:32].clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    kept: dict[int, nn.Module] = {}
    for epoch in range(32 if late else 12):
        if epoch in (10, 11, 20, 21, 30, 31):
            kept[epoch] = copy.deepcopy(model).eval()
        for group in optimizer.param_groups:
            group["lr"] = RATES[10] if epoch < 15 else RATES[20] if epoch < 25 else RATES[30]
        model.train()
        for chosen in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            classification_loss(model, (x[chosen], y[chosen])).backward()
            optimizer.step()
    found = [
        Setting(
            f"ResNet-18, 32 samples, after {epoch} epochs (learning rate {RATES[epoch]:g})",
            kept[epoch],
            kept[epoch + 1],
            probe,
            nn.CrossEntropyLoss(),
        )
        for epoch in ((10, 20, 30) if late else (10,))
    ]
    return [*found, _with_exact_statistics(found[-1], x)] if late else found


def annealed_resnets(data: Path | None) -> Iterator[Setting]:
    """The same with random crops and flips, weight decay and a cosine down to zero, at the end; with both statistics.

    Unlike the network above it does not learn its images by heart.
    """
    x, y = images(data)
    model = resnet18(seed=42)
    probe = x[:32].clone(), y[:32].clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    kept: list[nn.Module] = []
    for epoch in range(ANNEALED_EPOCHS - 1):
        if epoch == ANNEALED_EPOCHS - 2:
            kept.append(copy.deepcopy(model).eval())
        model.train()
        batches = torch.randperm(len(x)).split(64)
        for i, chosen in enumerate(batches):
            done = (epoch + i / len(batches)) / ANNEALED_EPOCHS
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (1 + math.cos(math.pi * done))
            optimizer.zero_grad()
            classification_loss(model, (_augmented(x[chosen]), y[chosen])).backward()
            optimizer.step()
    name = f"ResNet-18, augmented, annealed, after {ANNEALED_EPOCHS - 2} epochs of {ANNEALED_EPOCHS}"
    found = Setting(name, *kept, model.eval(), probe, nn.CrossEntropyLoss())
    yield found
    yield _with_exact_statistics(found, x)


def _augmented(x: Tensor) -> Tensor:
    """Random crops of the padded images, half of them mirrored."""
    padded = F.pad(x, (4, 4, 4, 4))
    places = torch.randint(9, (len(x), 2)).tolist()
    crops = torch.stack([image[:, i : i + 32, j : j + 32] for image, (i, j) in zip(padded, places)])
    return torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, crops, crops.flip(3))


def _with_exact_statistics(setting: Setting, x: Tensor) -> Setting:
    """Batch norm by the statistics of all images, in place of the running ones of the last few batches."""
    models = [copy.deepcopy(setting.model), copy.deepcopy(setting.later)]
    for model in models:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
                module.momentum = None  # the mean over all batches
        model.train()
        with torch.no_grad():
            for part in x.split(295):
                model(part)
    name = f"{setting.name}, batch norm by all images"
    return setting._replace(name=name, model=models[0].eval(), later=models[1].eval())


class FlatDecoder(nn.Module):
    """Logits as (tokens, vocabulary): what the other packages take."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.inner = Decoder(layers=4, width=64, heads=4, tokens=64, vocabulary=vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids).flatten(0, 1)


def trained_decoders(late: bool) -> list[Setting]:
    """Four layers of width 64 on characters of Python's own documentation, after 200 steps, and annealed after 1,300.

    Each also 100 steps later. The learning rate falls from step 900 on, to nearly zero at 1,400. `late`: both.
    """
    return cached(f"decoders, {late}", lambda: _trained_decoders(late))


def _trained_decoders(late: bool) -> list[Setting]:
    from pydoc_data.topics import topics

    torch.manual_seed(0)
    text = "".join(topics[key] for key in sorted(topics))[:200_000]
    characters = sorted(set(text))
    code = torch.tensor([characters.index(c) for c in text])
    model = FlatDecoder(len(characters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def windows(count: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(code) - 65, (count,))
        ids = torch.stack([code[s : s + 65] for s in starts.tolist()])
        return ids[:, :-1], ids[:, 1:].flatten()

    probe = windows(8)
    kept: dict[int, nn.Module] = {}
    for step in range(1401 if late else 301):
        if step in (200, 300, 1300, 1400):
            kept[step] = copy.deepcopy(model).eval()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (1401 - step) / 500)
        ids, following = windows(32)
        optimizer.zero_grad()
        F.cross_entropy(model(ids), following).backward()
        optimizer.step()
    names = {200: "decoder, 8 x 64 characters", 1300: "decoder, annealed, after 1,300 steps of 1,400"}
    return [
        Setting(names[s], kept[s], kept[s + 100], probe, nn.CrossEntropyLoss())
        for s in ((200, 1300) if late else (200,))
    ]
