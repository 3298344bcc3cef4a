"""Ways to compute k products T[:, w] Z: one after the other, batched with vmap, and forward over reverse.

    python -m benchmarks.products

Prints the time of eight products in units of the loop, for a perceptron, a convolutional network and attention.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp

from benchmarks.networks import Decoder, classification_loss, next_token_loss, residual_gelu
from curvmon.operators.session import open_session
from tests.helpers.resnet import resnet18

COLUMNS = 8


def best_of(function: Callable[[], object], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def compare(name: str, model: nn.Module, batch: object, loss: Callable[..., Tensor], node: str) -> None:
    # torch's own operations, which all three ways can use
    options: dict[str, Any] = {"output": None, "batch_dim": 0, "dtype": None, "efficient": False}
    with open_session(model, batch, loss=loss, nodes=[node], **options) as session:
        operator = session.operator
        tap, slope = operator.graph.taps[0], operator._slopes[0]
        assert slope is not None
        z = torch.randn(COLUMNS, *tap.shape)

        def one(vectors: Tensor, batched: bool) -> object:
            return torch.autograd.grad(slope, [tap], vectors, retain_graph=True, is_grads_batched=batched)  # type: ignore[arg-type]

        loop = best_of(lambda: [one(column, False) for column in z])
        batched = best_of(lambda: one(z, True))

        module = model.get_submodule(node)
        parameters = {key: value.detach() for key, value in model.named_parameters()}

        def shifted(shift: Tensor) -> Tensor:
            handle = module.register_forward_hook(lambda module, args, out: out + shift)
            try:
                return functional_call(
                    _WithLoss(model, loss), {f"model.{k}": p for k, p in parameters.items()}, (batch,)
                )
            finally:
                handle.remove()

        at = torch.zeros_like(tap)
        forward = best_of(lambda: [jvp(grad(shifted), (at,), (column,)) for column in z])
    print(f"{name:36} vmap {batched / loop:5.2f}   forward over reverse {forward / loop:5.2f}   (loop 1, {loop:.3f} s)")


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, batch: object) -> Tensor:
        return self._loss(self.model, batch)


def main() -> None:
    torch.manual_seed(0)
    labels = torch.randint(10, (32,))
    mlp = residual_gelu(), (torch.randn(32, 32), labels), classification_loss
    compare("residual MLP, width 64, stem", *mlp, "stem")
    wide = residual_gelu(width=1024), (torch.randn(32, 32), labels), classification_loss
    compare("residual MLP, width 1024, stem", *wide, "stem")
    conv = resnet18(activation=F.silu).eval(), (torch.randn(32, 3, 32, 32), labels), classification_loss
    compare("ResNet-18 SiLU, behind the max-pool", *conv, "maxpool")
    compare("ResNet-18 SiLU, layer3", *conv, "layer3")
    small = Decoder(layers=2, width=32, tokens=16, vocabulary=64), torch.randint(64, (8, 17)), next_token_loss
    compare("decoder, 2 layers, width 32, layer 0", *small, "layers.0")
    large = Decoder(), torch.randint(8192, (8, 129)), next_token_loss
    compare("decoder, 12 layers, width 128, layer 5", *large, "layers.5")


if __name__ == "__main__":
    main()
