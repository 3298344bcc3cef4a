"""Networks with an operation that cannot be differentiated twice, each next to its form in differentiable ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

Batch = tuple[Tensor, Tensor]


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 - ctx.saved_tensors[0].tanh().square())


class KinkedOnce(Once):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp_min(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (ctx.saved_tensors[0] > 0)


class Compiled(torch.autograd.Function):
    """As torch.compile: the backward pass is a function of its own, whose backward pass raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return CompiledBackward.apply(gradient, ctx.saved_tensors[0])


class CompiledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, x: Tensor) -> Tensor:
        s = x.sigmoid()
        return gradient * s * (1 + x * (1 - s))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("torch.compile with aot_autograd does not currently support double backward")


class Attention(torch.autograd.Function):
    """As a kernel of another package: its gradients do not show what they depend on, and nothing raises."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return attention(q, k, v)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            return torch.autograd.grad(attention(*leaves), leaves, gradient.detach())


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v


class Apply(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class AttentionBlock(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.qkv, self.out, self.function = nn.Linear(6, 24), nn.Linear(8, 6), function

    def forward(self, x: Tensor) -> Any:
        return self.out(self.function(*self.qkv(x).chunk(3, -1)))


class Bag(nn.Module):
    """A sum of embeddings with weights that a layer computes."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused, self.weights, self.bag = fused, nn.Linear(6, 4), nn.EmbeddingBag(9, 6, mode="sum")

    def forward(self, x: Tensor) -> Any:
        weights = self.weights(x).tanh()
        words = torch.arange(len(x) * 4, device=x.device).reshape(-1, 4) % 9
        if self.fused:
            return self.bag(words, per_sample_weights=weights)
        return (self.bag.weight[words] * weights.unsqueeze(-1)).sum(1)


def ctc_by_hand(log_probs: Tensor, targets: Tensor) -> Tensor:
    """T x B x V and B x S: minus the log-probability of all alignments, by target length and sample."""
    losses = []
    for scores, target in zip(log_probs.unbind(1), targets.tolist()):
        labels = [0, *(label for each in target for label in (each, 0))]
        never = torch.full((), -1e30, dtype=scores.dtype)
        paths = [scores[0, labels[0]], scores[0, labels[1]], *[never] * (len(labels) - 2)]
        for frame in scores[1:]:
            following = []
            for i, label in enumerate(labels):
                skips = i > 1 and label != 0 and label != labels[i - 2]
                sources = paths[max(0, i - (2 if skips else 1)) : i + 1]
                following.append(torch.logsumexp(torch.stack(sources), 0) + frame[label])
            paths = following
        losses.append(-torch.logsumexp(torch.stack(paths[-2:]), 0) / len(target))
    return torch.stack(losses).mean()


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def ctc(model: nn.Module, batch: Batch) -> Tensor:
    log_probs = model(batch[0]).log_softmax(-1).transpose(0, 1)
    frames, samples = log_probs.shape[:2]
    return F.ctc_loss(log_probs, batch[1], torch.full((samples,), frames), torch.full((samples,), batch[1].shape[1]))


def plain_ctc(model: nn.Module, batch: Batch) -> Tensor:
    return ctc_by_hand(model(batch[0]).log_softmax(-1).transpose(0, 1), batch[1])


def classifier(block: nn.Module, width: int = 6) -> nn.Sequential:
    rest = nn.Linear(width, 12), nn.Tanh(), nn.Linear(12, 3)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), block, nn.Flatten(), *rest)


def recogniser() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 5))


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=True)


class Case(NamedTuple):
    """`build(True)` has the operation, `build(False)` the differentiable form of the same."""

    build: Callable[[bool], nn.Module]
    names: str
    """what the notes name"""
    loss: Callable[[nn.Module, Batch], Tensor] = cross_entropy
    plain_loss: Callable[[nn.Module, Batch], Tensor] = cross_entropy
    shape: tuple[int, ...] = (16, 6)
    target: Callable[[], Tensor] = lambda: torch.randint(3, (16,))

    def models(self) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        model, plain = self.build(True), self.build(False)
        plain.load_state_dict(model.state_dict())
        return model, plain

    def batch(self) -> Batch:
        torch.manual_seed(1)
        return torch.randn(self.shape), self.target()


def of(function: Any, plain: Callable[[Tensor], Tensor]) -> Callable[[bool], nn.Module]:
    return lambda once: classifier(Apply(function.apply if once else plain))


CASES = {
    "CTC": Case(lambda once: recogniser(), "ctc_loss", ctc, plain_ctc, (8, 7, 6), lambda: torch.randint(1, 5, (8, 3))),
    "EmbeddingBag": Case(lambda once: classifier(Bag(once)), "embedding_bag"),
    "once_differentiable": Case(of(Once, torch.tanh), "Once"),
    "compiled block": Case(of(Compiled, F.silu), "an operation"),
    "custom attention": Case(
        lambda once: classifier(AttentionBlock(Attention.apply if once else attention), 30),
        "Attention",
        shape=(16, 5, 6),
    ),
    "reentrant checkpoint": Case(
        lambda once: classifier((Checkpointed if once else nn.Sequential)(nn.Linear(6, 6), nn.Tanh())), ""
    ),
}
