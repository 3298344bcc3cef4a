"""One run in Lightning, Fabric, transformers' Trainer and a plain loop: the same weights, curvature and alerts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import curvmon

pytestmark = pytest.mark.slow
STEPS, EVERY, FAULT = 480, 12, 360
SETTINGS: dict[str, Any] = {"max_overhead": None, "every_n_train_steps": EVERY, "data": "train", "pulse": 10}
Batch = dict[str, Tensor]


class Network(nn.Module):
    """As the models of transformers: the loss is an output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(F.gelu(self.second(F.gelu(self.first(x)))))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def loss(model: Any, batch: Batch) -> Tensor:
    return model(**batch)["loss"]


def batches() -> list[Batch]:
    """Four classes around four centres; after FAULT steps labels are shuffled."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(4, 16, generator=generator)
    found = []
    for step in range(STEPS):
        labels = torch.randint(4, (64,), generator=generator)
        x = centres[labels] + torch.randn(64, 16, generator=generator)
        if step >= FAULT:
            labels = labels[torch.randperm(64, generator=generator)]
        found.append({"x": x, "labels": labels})
    return found


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Batch]:
        return iter(batches())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def plain(folder: Path, watched: bool, fabric: Fabric | None = None) -> tuple[Any, nn.Module]:
    network = Network()
    model, optimizer = network, optimizer_of(network)
    if fabric is not None:
        model, optimizer = fabric.setup(network, optimizer)
    monitor = curvmon.Monitor(**SETTINGS)
    if watched:
        monitor.attach(model, optimizer, loss, total_steps=STEPS)
    for step, batch in enumerate(batches(), 1):
        if watched:
            monitor.observe(batch)
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward() if fabric is None else fabric.backward(value)
        optimizer.step()
        if watched:
            monitor.step(step, value)
    return monitor, network


def with_fabric(folder: Path, watched: bool) -> tuple[Any, nn.Module]:
    return plain(folder, watched, Fabric(accelerator="cpu", devices=1))


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Network()

    def forward(self, **batch: Tensor) -> Any:
        return self.net(**batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self)


def lightning(folder: Path, watched: bool) -> tuple[Any, nn.Module]:
    module, monitor = Module(), curvmon.CurvatureMonitor(**SETTINGS)
    pl.Trainer(
        max_epochs=1, callbacks=[monitor] if watched else [], logger=False, enable_checkpointing=False,
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    ).fit(module, DataLoader(Stream(), batch_size=None))  # fmt: skip
    return monitor, module.net


def hugging_face(folder: Path, watched: bool) -> tuple[Any, nn.Module]:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    from curvmon.integrations.transformers import CurvatureCallback

    network, monitor = Network(), CurvatureCallback(**SETTINGS)
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=1, max_grad_norm=0, save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant", remove_unused_columns=False,
        logging_strategy="no",
    )  # fmt: skip
    optimizer = optimizer_of(network)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    Trainer(
        network, arguments, lambda samples: samples[0], Stream(), callbacks=[monitor] if watched else [],
        optimizers=(optimizer, constant),
    ).train()  # fmt: skip
    return monitor, network


LOOPS = {"plain": plain, "fabric": with_fabric, "lightning": lightning, "hugging face": hugging_face}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, nn.Module]:
    return plain(tmp_path_factory.mktemp("plain"), watched=True)


@pytest.mark.parametrize("name", LOOPS)
def test_the_same_run(name: str, expected: tuple[Any, nn.Module], tmp_path: Path) -> None:
    reference, trained = expected
    monitor, network = LOOPS[name](tmp_path, watched=True)
    _, unwatched = LOOPS[name](tmp_path, watched=False)
    for key, value in trained.state_dict().items():
        assert torch.equal(network.state_dict()[key], value) and torch.equal(unwatched.state_dict()[key], value)
    # Lightning counts a batch when its hooks are over
    late = 1 if name == "lightning" else 0
    steps = [snapshot.step + late * (snapshot.step > 0) for snapshot in monitor.snapshots]
    assert steps == [snapshot.step for snapshot in reference.snapshots] == [0, *range(EVERY, STEPS + 1, EVERY)]
    for ours, theirs in zip(monitor.history, reference.history):
        assert torch.equal(ours.resonance, theirs.resonance) and torch.equal(ours.gn_gap, theirs.gn_gap)
    for mine, other in zip(monitor.spectra, reference.spectra):
        assert torch.equal(mine.eigenvalues, other.eigenvalues) and mine.loss == other.loss
    assert [(p.step + late, p.gain, p.curvature) for p in monitor.pulses] == [
        (p.step, p.gain, p.curvature) for p in reference.pulses
    ]
    assert [(a.kind, a.metric, a.step + late, a.score) for a in monitor.alerts] == [
        (a.kind, a.metric, a.step, a.score) for a in reference.alerts
    ]


def test_the_fault_is_found_at_once(expected: tuple[Any, nn.Module]) -> None:
    monitor, _ = expected
    assert [(alert.step, alert.metric) for alert in monitor.alerts][:1] == [(FAULT + EVERY, "training_loss")]
