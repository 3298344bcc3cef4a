"""A training run of a family that events can disturb; a copy goes on with the same random streams.

Every training step seeds the global generator for itself (dropout, noise of a VAE), so that a disturbed copy differs
from its twin by the event alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from benchmarks.alert_families import Batch, Family
from benchmarks.alert_schedules import constant

PROBE = 32


class Observer(Protocol):
    """Sees each training step."""

    def before_step(self, run: Run, batch: Batch) -> None: ...

    def after_step(self, run: Run, loss: Tensor) -> None: ...


class Run:
    """Attributes that events change:

    factor: of the learning rate, on top of what the schedule sets.
    corrupt: what happens to training batches.
    ascends: steps go uphill.
    after_step: called after each step.
    schedule, batch, x, y: as of the family at first.
    """

    def __init__(self, family: Family, seed: int, data: Path | None = None) -> None:
        self.family, self.seed = family, seed
        self.x, self.y, self.held_x, self.held_y = family.source(seed, data)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = family.make()
        self.optimizer = family.optimizer(family.groups(self.model))
        self.rates: list[float] = [group["lr"] for group in self.optimizer.param_groups]
        self.generator = torch.Generator().manual_seed(seed)
        self.schedule, self.batch = family.schedule, family.batch
        self.factor = 1.0
        self.corrupt: list[Callable[[Batch], Batch]] = []
        self.ascends = False
        self.after_step: list[Callable[[], None]] = []
        self._share = 1.0
        self.epoch = self.step = 0
        if family.unfreeze_at is not None:
            self._backbone().requires_grad_(False)

    def copied(self) -> Run:
        twin = copy.copy(self)
        # the optimizer's parameters are the model's: copied in one go, they stay so
        twin.model, twin.optimizer = copy.deepcopy((self.model, self.optimizer))
        twin.generator = torch.Generator()
        twin.generator.set_state(self.generator.get_state())
        twin.corrupt, twin.after_step = list(self.corrupt), list(self.after_step)
        return twin

    @property
    def scheduled_rate(self) -> float | None:
        """The largest learning rate that the schedule has set last; None at a constant rate."""
        return None if self.schedule is constant else max(self.rates) * self._share

    @property
    def probe(self) -> Batch:
        """The first samples of the validation."""
        return self.held_x[:PROBE], self.held_y[:PROBE]

    def train(self, observer: Observer, halfway: Callable[[], None] | None = None) -> None:
        """One epoch; `halfway` is called in its middle."""
        if self.epoch == self.family.unfreeze_at:
            self._backbone().requires_grad_(True)
        self.model.train()
        # as many batches as ever, also of fewer samples
        order = torch.randperm(self.family.steps * self.batch, generator=self.generator) % len(self.x)
        for i, chosen in enumerate(order.split(self.batch)):
            if halfway is not None and i == self.family.steps // 2:
                halfway()
            batch = self._augmented((self.x[chosen], self.y[chosen]))
            for corrupt in self.corrupt:
                batch = corrupt(batch)
            self._share = self.schedule(self.epoch + i / self.family.steps)
            for group, rate in zip(self.optimizer.param_groups, self.rates):
                group["lr"] = rate * self._share * self.factor
            observer.before_step(self, batch)
            observer.after_step(self, self._step(batch))
        self.epoch += 1

    def _step(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1_000_003 * self.seed + self.step)
            loss = self.family.loss(self.model, batch)
        (-loss if self.ascends else loss).backward()  # type: ignore[no-untyped-call]
        if self.family.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.family.clip)
        self.optimizer.step()
        self.step += 1
        for after in self.after_step:
            after()
        return loss.detach()

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """What a user would log."""
        self.model.eval()
        held = self.held_x, self.held_y
        logged = {"val_loss": self.family.loss(self.model, held).item()}
        if self.family.accuracy is not None:
            logged["val_accuracy"] = self.family.accuracy(self.model, held)
        self.model.train()
        return logged

    def _augmented(self, batch: Batch) -> Batch:
        down, right = torch.randint(-1, 2, (2,), generator=self.generator).tolist()
        return (batch[0].roll((down, right), (2, 3)), batch[1]) if self.family.shifts else batch

    def _backbone(self) -> nn.Module:
        assert isinstance(self.model, nn.Sequential)
        return self.model[: self.family.backbone]
