"""Twelve families of small networks, each with its data, optimizer and schedule: what `alert_recording` trains.

Thresholds and probabilities are tuned on TUNED with seeds from 0 on, and reported on REPORTED with seeds from 1000 on.
Every family has a schedule and an optimizer of its own; most have nodes of the default choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import alert_data, alert_networks, alert_schedules
from benchmarks.alert_data import TOKENS, Source
from benchmarks.alert_schedules import Schedule
from benchmarks.pulse_networks import VOCABULARY

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Any, Batch], Tensor]
Groups = list[dict[str, Any]]
"""of parameters, as optimizers take them"""
Kind = Literal["images", "text", "table"]
SPACE = ord(" ") - 31
"""as `pulse_networks.text` encodes it"""


def cross_entropy(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def squared_error(model: Any, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def evidence_bound(model: Any, batch: Batch) -> Tensor:
    """Cross-entropy of the pixels plus a tenth of the divergence from the prior, per pixel."""
    x = batch[0]
    logits, mean, log_variance = model(x)
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
    return F.binary_cross_entropy_with_logits(logits, x) + 0.1 * divergence / x.shape[1]


def share_right(model: Any, batch: Batch) -> float:
    return (model(batch[0]).argmax(-1) == batch[1]).float().mean().item()


@dataclass(frozen=True)
class Family:
    """A kind of network, and how it is trained."""

    name: str
    kind: Kind
    make: Callable[[], nn.Module]
    source: Source
    optimizer: Callable[[Groups], torch.optim.Optimizer]
    rate: float
    schedule: Schedule
    loss: Loss = cross_entropy
    accuracy: Callable[[Any, Batch], float] | None = share_right
    batch: int = 64
    steps: int = 20
    """per epoch"""
    clip: float | None = None
    """largest norm of a gradient"""
    shifts: bool = False
    """images by up to one pixel, at random"""
    nodes: Sequence[str] | None = None
    backbone: int = 0
    """number of layers of a Sequential that are frozen at first, then trained at a third of the rate"""
    unfreeze_at: int | None = None
    """epoch"""
    hand: tuple[tuple[int, str], ...] = ()
    """what the schedule does abruptly, and before which epoch"""

    def groups(self, model: nn.Module) -> Groups:
        if not self.backbone:
            return [{"params": list(model.parameters()), "lr": self.rate}]
        assert isinstance(model, nn.Sequential)
        parts = model[: self.backbone], model[self.backbone :]
        return [
            {"params": list(part.parameters()), "lr": rate} for part, rate in zip(parts, (self.rate / 3, self.rate))
        ]


def _pretrained() -> nn.Module:
    """Convolutions trained briefly on digits, with a new head."""
    model = alert_networks.plain_convolutions(1, 12)
    assert isinstance(model, nn.Sequential)
    data = alert_data.digits(0, None)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(100):
        chosen = torch.randint(len(data.x), (64,))
        optimizer.zero_grad()
        cross_entropy(model, (data.x[chosen], data.y[chosen])).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    head = model[-1]
    assert isinstance(head, nn.Linear)
    head.reset_parameters()
    return model


_momentum = partial(torch.optim.SGD, momentum=0.9, weight_decay=5e-4)

TUNED = {
    family.name: family
    for family in (
        Family(
            "GELU MLP", "images", lambda: alert_networks.mlp(64, 96, 10, nn.GELU), alert_data.digits,
            torch.optim.Adam, 1e-3, alert_schedules.constant,
        ),
        Family(
            "Transformer", "text", lambda: alert_networks.CharacterTransformer(VOCABULARY, TOKENS),
            alert_data.characters, partial(torch.optim.AdamW, weight_decay=0.05), 5e-3,
            alert_schedules.warmup_and_cosine, batch=40, hand=((3, "end of warmup"),),
        ),
        Family(
            "VGG", "images", lambda: alert_networks.vgg(1, 8, 12), alert_data.digits,
            _momentum, 0.02, alert_schedules.cosine, shifts=True,
        ),
        Family(
            "OneCycle", "images", lambda: alert_networks.plain_convolutions(3, 12), alert_data.small_photos,
            _momentum, 0.1, alert_schedules.one_cycle, batch=48, shifts=True, hand=((9, "turn of the cycle"),),
        ),
        Family(
            "VAE", "images", lambda: alert_networks.VAE(64), alert_data.flat_digits,
            torch.optim.RMSprop, 1e-3, alert_schedules.decay, loss=evidence_bound, accuracy=None,
            nodes=("encoder.0", "encoder.2", "decoder.0"),
        ),
        Family(
            "Regression", "table", lambda: alert_networks.mlp(10, 48, 1, nn.ReLU), alert_data.table,
            partial(torch.optim.SGD, momentum=0.9, nesterov=True), 0.01, alert_schedules.constant,
            loss=squared_error, accuracy=None,
        ),
    )
}  # fmt: skip
REPORTED = {
    family.name: family
    for family in (
        Family(
            "Character LSTM", "text", lambda: alert_networks.CharacterLSTM(VOCABULARY), alert_data.characters,
            torch.optim.Adam, 0.015, alert_schedules.decay, clip=1.0,
        ),
        Family(
            "Fine-tuning", "images", _pretrained, alert_data.transposed_digits,
            torch.optim.AdamW, 3e-3, alert_schedules.constant, backbone=4, unfreeze_at=10,
            hand=((10, "unfreezing"),),
        ),
        Family(
            "ResNet", "images", lambda: alert_networks.residual(3, 16, 2, nn.ReLU, nn.BatchNorm2d),
            alert_data.small_photos, _momentum, 0.1, alert_schedules.warm_restarts, batch=48, shifts=True,
            hand=((10, "warm restart"), (20, "warm restart")),
        ),
        Family(
            "Mixer", "images", lambda: alert_networks.mixer(1, 8), alert_data.digits,
            _momentum, 0.05, alert_schedules.steps, shifts=True,
            hand=((15, "step decay"), (23, "step decay")),
        ),
        Family(
            "ViT", "images", lambda: alert_networks.vision_transformer(1, 8), alert_data.digits,
            partial(torch.optim.AdamW, weight_decay=0.05), 3e-3, alert_schedules.cosine,
        ),
        Family(
            "Group norm", "images",
            lambda: alert_networks.residual(3, 16, 2, nn.SiLU, lambda width: nn.GroupNorm(2, width)),
            alert_data.small_photos, torch.optim.Adam, 1e-2, alert_schedules.linear, batch=48,
        ),
    )
}  # fmt: skip
FAMILIES = {**TUNED, **REPORTED}
FIRST_SEED = {name: 0 if name in TUNED else 1000 for name in FAMILIES}
