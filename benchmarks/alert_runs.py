"""Real training runs of small networks, measured after every epoch; quiet, or disturbed by one event.

Residual networks with batch norm on scikit-learn's digits, with random shifts, by SGD with momentum or AdamW and a
cosine schedule, with ReLU or SiLU. Every event disturbs a copy of the same quiet run, so that both have the same past:
an event that acts through training a whole epoch before the measurement, one that acts at once half an epoch before.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from curvmon.alerts.context import Context, context_values
from curvmon.errors import CurvmonError
from curvmon.monitor.pairs_and_spectrum import measure_pairs, measure_spectrum
from curvmon.monitor.settings import Settings
from curvmon.monitor.vital_signs import TensorNorms
from curvmon.records import Snapshot

VALIDATIONS = 30
LEAST_RATE = 0.05
"""share of the learning rate at which the schedule ends"""
AFTER = 7
"""measurements from an event on"""
BATCH = 64
PROBE = 32
HELD_OUT = 300


class Block(nn.Module):
    def __init__(self, width: int, activation: nn.Module) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.activation = activation
        self.skip = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.activation(self.norm1(self.conv1(x)))))
        return self.activation(x + y if self.skip else y)


class Network(nn.Module):
    """Stem, four residual blocks, mean over pixels, linear head."""

    def __init__(self, width: int = 8, activation: Callable[[], nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), activation())
        self.blocks = nn.ModuleList(Block(width, activation()) for _ in range(4))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


NODES = ["stem", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]


def digits(seed: int) -> tuple[Tensor, Tensor]:
    """Images between 0 and 1 and their classes, in an order of the seed's."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(data.images, dtype=torch.float32)[order].unsqueeze(1) / 16, torch.tensor(data.target)[order]


class Observed(NamedTuple):
    """What a monitor sees at one measurement."""

    snapshot: Snapshot | str
    """or why there is none"""
    context: Context


class Run:
    """A training run that can be disturbed; `steady`: at a constant learning rate."""

    def __init__(self, seed: int, steady: bool = False) -> None:
        self.steady = steady
        torch.manual_seed(seed)
        x, y = digits(seed)
        self.probe = x[-PROBE:].clone(), y[-PROBE:].clone()
        self.x, self.y = x[:-HELD_OUT], y[:-HELD_OUT]
        self.model = Network(activation=nn.SiLU if seed % 3 == 2 else nn.ReLU)
        parameters = self.model.parameters()
        if seed % 2:
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        else:
            self.optimizer = torch.optim.SGD(parameters, lr=0.005, momentum=0.9, weight_decay=5e-4)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.factor = 1.0
        """on top of the schedule"""
        self.generator = torch.Generator().manual_seed(seed)
        self.settings = Settings(nodes=NODES, eigenvalues=1, seed=seed)
        self._start: Tensor | None = None
        self.epoch = self.step = 0
        self.training_loss = math.nan
        """mean over the last epoch"""

    def copied(self) -> Run:
        generator = self.generator.get_state()
        twin = copy.copy(self)
        twin.model, twin.optimizer = copy.deepcopy((self.model, self.optimizer))
        # the optimizer's parameters are the model's: copied in one go, they stay so
        twin.generator = torch.Generator()
        twin.generator.set_state(generator)
        return twin

    def train(self, halfway: Callable[[Run], None] | None = None) -> None:
        """One epoch; `halfway` is called in its middle."""
        self.model.train()
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, self.epoch / VALIDATIONS)))
        middle = self.step + len(self.x) // BATCH // 2
        losses = []
        for chosen in torch.randperm(len(self.x), generator=self.generator).split(BATCH):
            if len(chosen) < BATCH:
                break
            if halfway is not None and self.step == middle:
                halfway(self)
            for group, rate in zip(self.optimizer.param_groups, self.rates):
                group["lr"] = rate * self.factor * (1.0 if self.steady else max(LEAST_RATE, cosine))
            down, right = torch.randint(-1, 2, (2,), generator=self.generator).tolist()
            images = self.x[chosen].roll((down, right), (2, 3))
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(images), self.y[chosen])
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
            self.step += 1
        self.epoch += 1
        self.training_loss = statistics.mean(losses)

    def measure(self) -> Observed:
        try:
            measurement = measure_pairs(self.settings, self.model, [self.probe], _loss)
            spectrum, self._start = measure_spectrum(
                self.settings, self.model, [self.probe], _loss, start=self._start, optimizer=self.optimizer
            )
        except CurvmonError as error:
            return Observed(str(error), Context())
        norms = TensorNorms().look(self.model).norms
        values = context_values(norms, self.optimizer.param_groups[0]["lr"], self.training_loss)
        snapshot = Snapshot(step=self.step, epoch=self.epoch, measurement=measurement, spectrum=spectrum)
        return Observed(snapshot, Context(values, measurement.operations))


def _loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


# ---- events ----


def learning_rate(run: Run) -> None:
    run.factor = 20.0


def labels_shuffled(run: Run) -> None:
    run.y = run.y[torch.randperm(len(run.y), generator=run.generator)]


@torch.no_grad()
def weights_zeroed(run: Run) -> None:
    weight = run.model.blocks[1].conv1.weight
    weight[torch.rand(weight.shape, generator=run.generator) < 0.5] = 0


def statistics_frozen(run: Run) -> None:
    """As after loading weights without buffers: running statistics at their initial values, and they stay there."""
    for module in run.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = 0.0


def skip_cut(run: Run) -> None:
    run.model.blocks[2].skip = False


def activation_exchanged(run: Run) -> None:
    run.model.blocks[1].activation = nn.Tanh()


def data_shifted(run: Run) -> None:
    """Training images arrive inverted."""
    run.x = 1 - run.x


@torch.no_grad()
def not_a_number(run: Run) -> None:
    run.model.blocks[0].conv1.weight[0, 0, 0, 0] = float("nan")


class Event(NamedTuple):
    apply: Callable[[Run], None]
    place: str | None
    """the node at whose output or in whose forward it happens; None: everywhere"""
    when: Literal["start", "middle", "end"] = "start"
    """of the epoch before the measurement; "end" if training would undo it"""


EVENTS = {
    "learning rate x 20": Event(learning_rate, None),
    "labels shuffled": Event(labels_shuffled, None),
    "half of a layer's weights zeroed": Event(weights_zeroed, "blocks.1", "end"),
    "batch norm statistics reset and frozen": Event(statistics_frozen, None, "middle"),
    "skip connection cut": Event(skip_cut, "blocks.2", "middle"),
    "activation exchanged": Event(activation_exchanged, "blocks.1", "middle"),
    "data shifted": Event(data_shifted, None),
    "NaN in a weight": Event(not_a_number, None),
}


class Disturbed(NamedTuple):
    event: str
    at: int
    """index of the first measurement after it"""
    measured: list[Observed]


def record(seed: int, validations: int = VALIDATIONS) -> tuple[list[Observed], list[Disturbed]]:
    """The quiet run of a seed, and one disturbed run for each event, at moments between a third and three quarters."""
    drawn = torch.Generator().manual_seed(seed)
    low, high = validations // 3, validations * 3 // 4
    moments = {name: int(torch.randint(low, high, (1,), generator=drawn)) for name in EVENTS}
    run = Run(seed)
    quiet, disturbed = [run.measure()], []
    for i in range(1, validations):
        for name, at in moments.items():
            if at == i:
                disturbed.append(Disturbed(name, i, [*quiet, *_branch(run.copied(), EVENTS[name])]))
        run.train()
        quiet.append(run.measure())
    return quiet, disturbed


def record_steady(seed: int, validations: int = VALIDATIONS) -> list[Observed]:
    """A quiet run at a constant learning rate, where the curvature of small networks swings by itself."""
    run = Run(seed, steady=True)
    measured = [run.measure()]
    for _ in range(1, validations):
        run.train()
        measured.append(run.measure())
    return measured


def _branch(run: Run, event: Event) -> list[Observed]:
    measured = []
    for i in range(AFTER):
        if i == 0 and event.when == "start":
            event.apply(run)
        run.train(event.apply if i == 0 and event.when == "middle" else None)
        if i == 0 and event.when == "end":
            event.apply(run)
        measured.append(run.measure())
    return measured
