"""Every network with its nodes and inputs, and every loss, as users write it and by hand."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import oracle
from tests.helpers.networks import (
    CLASSES,
    SAMPLES,
    WIDTH,
    Attention,
    CalledTwice,
    Contrastive,
    ConvNet,
    Diamond,
    Encoder,
    Recurrent,
    ResidualMLP,
    TwoHeads,
    UNet,
    attention_by_hand,
    called_twice_by_hand,
    contrastive_by_hand,
    conv_by_hand,
    diamond_by_hand,
    encoder_by_hand,
    gru_by_hand,
    lstm_by_hand,
    relu_mlp,
    residual_mlp_by_hand,
    two_heads_by_hand,
    unet_by_hand,
)


@dataclass(frozen=True)
class Case:
    """`module` and `by_hand(module, x, e)` compute the same outputs; e has one perturbation per node."""

    name: str
    module: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    nodes: list[str]
    labels: list[str]
    shapes: list[tuple[int, ...]]
    by_hand: Callable[[Any, Tensor, Sequence[Tensor]], list[Tensor]]


# losses: output, targets -> scalar. One as users write it, one by hand where torch's own is a composition.
def targets(seed: int = 1) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "classes": torch.randint(CLASSES, (SAMPLES,), generator=g),
        "values": torch.randn(SAMPLES, CLASSES, generator=g),
        "shares": torch.rand(SAMPLES, CLASSES, generator=g),
    }


LOSSES: dict[str, Callable[[Tensor, dict[str, Tensor]], Tensor]] = {
    "cross_entropy": lambda out, t: F.cross_entropy(out, t["classes"]),
    "mse": lambda out, t: F.mse_loss(out, t["values"]),
    "bce_with_logits": lambda out, t: F.binary_cross_entropy_with_logits(out, t["shares"]),
    "log_softmax+nll": lambda out, t: F.nll_loss(F.log_softmax(out, dim=-1), t["classes"]),
    "huber": lambda out, t: F.huber_loss(out, t["values"], delta=0.7),
}

BY_HAND: dict[str, Callable[[Tensor, dict[str, Tensor]], Tensor]] = {
    "cross_entropy": lambda out, t: (out.logsumexp(-1) - out[range(len(out)), t["classes"]]).mean(),
    "mse": lambda out, t: (out - t["values"]).square().mean(),
    "bce_with_logits": lambda out, t: (F.softplus(out) - t["shares"] * out).mean(),
    "log_softmax+nll": lambda out, t: (out.logsumexp(-1) - out[range(len(out)), t["classes"]]).mean(),
    "huber": lambda out, t: torch.where(
        (out - t["values"]).abs() <= 0.7,
        0.5 * (out - t["values"]).square(),
        0.7 * ((out - t["values"]).abs() - 0.35),
    ).mean(),
}


def _rows(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(2))


def _case(name: str, module: Callable[[], nn.Module], inputs: Callable[[], Tensor], by_hand: Any, **taps: Any) -> Case:
    """`taps` maps node names to shapes, in execution order; a list of shapes is a module called several times."""
    labels, shapes = [], []
    for node, shape in taps.items():
        node = node.replace("__", ".")
        for call, one in enumerate(shape if isinstance(shape, list) else [shape]):
            labels.append(f"{node}.call{call + 1}" if isinstance(shape, list) else node)
            shapes.append(one)
    return Case(name, module, inputs, [node.replace("__", ".") for node in taps], labels, shapes, by_hand)


W = (WIDTH,)
CASES = [
    _case("residual MLP", ResidualMLP, _rows(7), residual_mlp_by_hand, stem=W, blocks__0=W, blocks__1=W),
    _case(
        "ReLU MLP",
        relu_mlp,
        _rows(7),
        lambda m, x, e: [m[4]((m[2]((m[0](x) + e[0]).clamp_min(0)) + e[1]).clamp_min(0))],
        **{"0": W, "2": W},
    ),
    _case("diamond, sum", lambda: Diamond("sum", F.silu), _rows(7), diamond_by_hand, left=W, right=W, join=W),
    _case("diamond, cat", lambda: Diamond("cat", F.silu), _rows(7), diamond_by_hand, left=W, right=W, join=W),
    _case("conv + BN + pool", ConvNet, _rows(2, 4, 4), conv_by_hand, conv1=(4, 4, 4), conv2=(6, 2, 2)),
    _case("LSTM", lambda: Recurrent(nn.LSTM), _rows(4, 3), lstm_by_hand, embed=(4, 6), rnn=(4, 5)),
    _case("GRU", lambda: Recurrent(nn.GRU), _rows(4, 3), gru_by_hand, embed=(4, 6), rnn=(4, 5)),
    _case("attention", lambda: Attention(1), _rows(4, 6), attention_by_hand, q=(4, 6), k=(4, 6), v=(4, 6)),
    _case("two-head attention", lambda: Attention(2), _rows(4, 6), attention_by_hand, q=(4, 6), k=(4, 6), v=(4, 6)),
    _case(
        "TransformerEncoder",
        Encoder,
        _rows(4, 3),
        encoder_by_hand,
        embed=(4, 6),
        encoder__layers__0=(4, 6),
        encoder__layers__1=(4, 6),
    ),
    _case("called twice", CalledTwice, _rows(7), called_twice_by_hand, stem=W, shared=[W, W]),
    _case(
        "U-Net",
        UNet,
        _rows(1, 4, 4),
        unet_by_hand,
        down1=(2, 4, 4),
        down2=(4, 2, 2),
        middle=(4, 1, 1),
        up2=(2, 2, 2),
        up1=(2, 4, 4),
    ),
    _case("two heads", TwoHeads, _rows(7), two_heads_by_hand, stem=W, trunk=W),
    _case("contrastive", Contrastive, _rows(7), contrastive_by_hand, stem=W, project=W),
]


def make(case: Case) -> tuple[nn.Module, tuple[Tensor, dict[str, Tensor]]]:
    """A float32 module in train mode, as a user would have it, and a batch."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = case.module()
    return module.train(), (case.inputs(), targets())


def user_loss(kind: str) -> Callable[[nn.Module, tuple[Tensor, dict[str, Tensor]]], Tensor]:
    """The loss as a user writes it; a second head gets a second term."""

    def loss(model: nn.Module, batch: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
        x, t = batch
        out = model(x)
        if isinstance(out, tuple):
            return LOSSES[kind](out[0], t) + 0.5 * F.mse_loss(out[1], t["values"][:, :3])
        return LOSSES[kind](out, t)

    return loss


def hand_criterion(kind: str, t: dict[str, Tensor]) -> Callable[[Sequence[Tensor]], Tensor]:
    def criterion(outputs: Sequence[Tensor]) -> Tensor:
        loss = BY_HAND[kind](outputs[0], t)
        if len(outputs) > 1:
            loss = loss + 0.5 * (outputs[1] - t["values"][:, :3]).square().mean()
        return loss

    return criterion


@functools.cache
def truth_of(name: str, kind: str) -> oracle.Truth:
    """The dense blocks of a case with a loss, by the independent oracle."""
    case = next(case for case in CASES if case.name == name)
    module, (x, t) = make(case)
    twin = copy.deepcopy(module).double().eval()
    t = {key: value.double() if value.is_floating_point() else value for key, value in t.items()}
    criterion = hand_criterion(kind, t)
    return oracle.truth(lambda e: case.by_hand(twin, x.double(), e), criterion, case.shapes)
