"""Layers that are linear in their own parameters, f = A(x) θ, and their second derivatives.

Linear, convolution, the affine part of a normalisation. If such a layer runs once, and nothing else uses its θ, then

    ∂² <c, out> / ∂θ²  =  A^T (∂² <c, out> / ∂f²) A                the network's curvature at f, and no other term
    ‖J_i^T s‖²  =  ‖Σ_t g_it a_it^T‖²,  J_i = d out_i / dθ         per sample i, from its inputs a and gradients g

Both follow from derivatives w.r.t. a zero tap on f; the parameters are held constant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from curvmon.graph.autograd import product
from curvmon.graph.model_output import zero_leaf
from curvmon.graph.taps import TappedGraph
from curvmon.isolation.patches import has_forward_hooks
from curvmon.numerics import gaussian, precise, row_norms_squared

_LINEAR_LAYERS = """
    Linear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d BatchNorm1d BatchNorm2d BatchNorm3d
    LayerNorm GroupNorm RMSNorm InstanceNorm1d InstanceNorm2d InstanceNorm3d
"""
LINEAR_IN_THEIR_PARAMETERS = frozenset(getattr(nn, name) for name in _LINEAR_LAYERS.split())
"""these types only: a subclass may compute something else"""
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMALISATIONS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.InstanceNorm1d,
    nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
MAX_ENTRIES = 2**23
"""most entries of per-sample gradients that are held at a time"""


class Layer:
    """One layer in one forward pass: its input x, and the tap on its output f."""

    def __init__(self, module: nn.Module, trained: Mapping[str, Tensor], x: Tensor, tap: Tensor) -> None:
        self._module = module
        self._trained = trained
        self._x = x
        self.tap = tap
        self._grams: dict[int, Tensor] = {}
        self._unit: dict[str, Tensor] = {}

    def tangent(self, entries: Callable[[Tensor], Tensor]) -> Tensor:
        """A(x) z with z = entries(θ)."""
        own = dict(self._module.named_parameters(recurse=False))
        z = {name: entries(p) if name in self._trained else torch.zeros_like(p) for name, p in own.items()}
        image: Tensor = functional_call(self._module, z, (self._x,))
        return image

    def pulled_back(self, gradient: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """A(x)^T g: each parameter of the layer, with its gradient."""
        trained = {name: p.detach() for name, p in self._trained.items()}
        gradients = vjp(lambda p: functional_call(self._module, p, (self._x,)), trained)[1](gradient)[0]
        return ((self._trained[name], g) for name, g in gradients.items())

    def has_sample_rows(self, samples: int) -> bool:
        """Whether the first dimension counts samples, or several rows per sample."""
        return all(t.ndim > 1 and len(t) and len(t) % samples == 0 for t in (self._x, self.tap))

    def squared_norms(self, gradient: Tensor, samples: int) -> Tensor:
        """‖d<s_i, out_i>/dθ‖² of every sample, from the gradient of Σ_i <s_i, out_i> w.r.t. f, whose rows they are."""
        if isinstance(self._module, _NORMALISATIONS):
            return self._of_normalisation(gradient, samples)
        x, g = (t.reshape(samples, len(t) // samples, *t.shape[1:]) for t in (self._x, gradient))
        own = sum(p.numel() for p in self._trained.values())
        if positions := self.positions(samples):
            own = min(own, 2 * positions**2)  # as in `_outer`
        step = max(1, MAX_ENTRIES // max(x[0].numel() * self._patch, g[0].numel(), own))
        parts = [self._chunk(i, x[i : i + step], g[i : i + step]) for i in range(0, samples, step)]
        return torch.cat(parts)

    def positions(self, samples: int) -> int:
        """How often the same weights act within a sample (tokens, pixels); 0 if `projections` does not apply."""
        module = self._module
        same = isinstance(module, nn.Linear) or (isinstance(module, _CONVOLUTIONS) and module.groups == 1)
        if not (same and "weight" in self._trained and self.has_sample_rows(samples) and self._x.ndim == self.tap.ndim):
            return 0
        return self.tap.numel() // (samples * len(self._trained["weight"]))

    def projections(self, samples: int, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs projected to `width` random columns, samples x positions x width, and a random outputs x width matrix.

        The gradient w.r.t. the weights is Σ_t g_t x_t^T over the positions t. Projected on both sides it is small, and
        is computed without the gradient itself.
        """
        weight = self._trained["weight"].detach()
        random = {"weight": gaussian(weight[0], width, generator).T.reshape(width, *weight.shape[1:]) / width**0.5}
        if self._module.bias is not None:
            random["bias"] = weight.new_zeros(width)
        inputs = self.by_position(functional_call(self._module, random, (self._x,)), samples)
        return inputs, gaussian(weight.new_zeros(len(weight)), width, generator) / width**0.5

    def by_position(self, outputs: Tensor, samples: int) -> Tensor:
        """samples x positions x outputs."""
        if not isinstance(self._module, nn.Linear):
            outputs = outputs.movedim(1, -1)
        return outputs.reshape(samples, -1, outputs.shape[-1])

    @property
    def _patch(self) -> int:
        """How many patches an entry of the input belongs to."""
        module = self._module
        return module.kernel_size[0] * module.kernel_size[1] if isinstance(module, nn.Conv2d) else 1

    def _of_normalisation(self, gradient: Tensor, samples: int) -> Tensor:
        """f = γ x̂ + β, entry by entry: the gradients are sums of g x̂ and of g."""
        module, gradients = self._module, []
        x = gradient
        if "weight" in self._trained:
            if not self._unit:
                own = module.named_parameters()
                self._unit = {name: torch.full_like(p, float(name == "weight")) for name, p in own}
            x = gradient * functional_call(module, self._unit, (self._x,))
        for name, parameter in self._trained.items():
            each = (x if name == "weight" else gradient).reshape(samples, len(x) // samples, *x.shape[1:])
            if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
                gradients.append(each.reshape(samples, -1, parameter.numel()).sum(1))
            else:  # channels come after the samples
                gradients.append(each.flatten(3).sum((1, 3)) if each.ndim > 3 else each.sum(1))
        return row_norms_squared(gradients[0] if len(gradients) == 1 else torch.cat(gradients, dim=1))

    def _chunk(self, start: int, x: Tensor, g: Tensor) -> Tensor:
        module = self._module
        if isinstance(module, nn.Linear) and x.ndim > 2:
            return self._outer(start, lambda: x.flatten(1, -2), g.flatten(1, -2))
        if isinstance(module, nn.Conv2d) and x.ndim == 5 and _is_plain(module):

            def patches() -> Tensor:
                columns = F.unfold(
                    x.flatten(0, 1), module.kernel_size, module.dilation, _both(module.padding), module.stride
                )
                return columns.reshape(*x.shape[:2], *columns.shape[1:]).transpose(2, 3).flatten(1, 2)

            return self._outer(start, patches, g.flatten(3).transpose(2, 3).flatten(1, 2))
        trained = {name: p.detach() for name, p in self._trained.items()}

        def pulled_back(one: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
            gradients: dict[str, Tensor] = vjp(lambda p: functional_call(module, p, (one,)), trained)[1](cotangent)[0]
            return gradients

        norms = [row_norms_squared(each) for each in vmap(pulled_back)(x, g).values()]
        return torch.stack(norms).sum(0)

    def _outer(self, start: int, inputs: Callable[[], Tensor], g: Tensor) -> Tensor:
        """‖Σ_t g_t a_t^T‖² of every sample, or the equal Σ_tu <a_t, a_u> <g_t, g_u> if it is cheaper; with the bias.

        `inputs` computes the a_t, samples x positions x inputs.
        """
        total = precise(g.new_zeros(len(g)))
        if "weight" in self._trained:
            positions, outputs = g.shape[1:]
            width = self._trained["weight"][0].numel()
            if positions * (width + outputs) < width * outputs:
                if start not in self._grams:  # the same for every cotangent
                    a = inputs()
                    self._grams[start] = torch.bmm(a, a.mT)
                total += (self._grams[start] * torch.bmm(g, g.mT)).sum((1, 2), dtype=total.dtype)
            else:
                total += row_norms_squared(torch.bmm(g.mT, inputs()))
        if "bias" in self._trained:
            total += row_norms_squared(g.sum(1))
        return total


class LayeredGraph(NamedTuple):
    """A loss as a function of taps on its layers, and of the parameters (`rest`) that belong to none of them."""

    graph: TappedGraph
    layers: list[Layer]
    rest: list[Tensor]
    samples: int

    def gradients(self, cotangents: Sequence[Tensor]) -> list[Tensor]:
        """J^T c w.r.t. the taps of all layers and the other parameters."""
        return product(self.graph.outputs, [*(layer.tap for layer in self.layers), *self.rest], cotangents)


def _is_plain(module: nn.Conv2d) -> bool:
    return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)


def _both(padding: Any) -> tuple[int, ...]:
    return tuple(padding)


class TappedLayers:
    """Layers in the order of their calls, and the names of their parameters (`owned`)."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.owned: set[str] = set()
        self.calls: Counter[nn.Module] = Counter()

    def unusable(self) -> list[nn.Module]:
        """Modules that were called several times, or never, or in a way that is not supported."""
        return [module for module, calls in self.calls.items() if calls != 1]


@contextmanager
def tapped_layers(
    model: nn.Module, parameters: Mapping[str, Tensor], skip: Sequence[nn.Module] = ()
) -> Iterator[TappedLayers]:
    """Tap the layers whose trained parameters are all among `parameters`, and hold these constant in the context.

    Modules in `skip` are not tapped.
    """
    names = {id(p): name for name, p in parameters.items()}
    tapped = TappedLayers()
    with ExitStack() as stack:
        for module in model.modules():
            trained = {name: p for name, p in module.named_parameters(recurse=False) if p.requires_grad}
            wanted = trained and all(id(p) in names for p in trained.values())
            if wanted and _is_linear(module) and module not in skip:
                tapped.owned.update(names[id(p)] for p in trained.values())
                tapped.calls[module] = 0
                stack.callback(module.register_forward_hook(_hook(tapped, trained), prepend=True).remove)
                for parameter in trained.values():
                    stack.callback(parameter.requires_grad_, True)
                    parameter.requires_grad_(False)
        yield tapped


def _is_linear(module: nn.Module) -> bool:
    if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)) and module.running_mean is None:
        return False  # normalises by the batch: the gradient of a sample depends on the others
    if "forward" in module.__dict__ or has_forward_hooks(module):
        return False  # may compute something else than its class: a patch, weight_norm, pruning, a user's hook
    own = {name for name, _ in module.named_parameters(recurse=False)}
    return type(module) in LINEAR_IN_THEIR_PARAMETERS and own <= {"weight", "bias"}


def by_layers(
    model: nn.Module, once: Mapping[str, Tensor], build: Callable[[], TappedGraph]
) -> tuple[TappedGraph, list[Layer], set[str]]:
    """The graph with a tap on every layer that runs once, these layers, and the names of their parameters."""
    skip: list[nn.Module] = []
    while True:
        with tapped_layers(model, once, skip) as tapped:
            graph = build()
        unusable = tapped.unusable()
        if not unusable:
            return graph, tapped.layers, tapped.owned
        skip += unusable


def used_once(loss: Tensor, parameters: Sequence[Tensor]) -> set[int]:
    """Indices of the parameters that enter the graph behind a loss exactly once."""
    uses: Counter[int] = Counter()
    queue = [loss.grad_fn]
    seen = set(queue)
    while queue:
        function = queue.pop()
        for following, _ in function.next_functions if function is not None else ():
            uses[id(getattr(following, "variable", None))] += 1
            if following is not None and following not in seen:
                seen.add(following)
                queue.append(following)
    return {i for i, parameter in enumerate(parameters) if uses[id(parameter)] == 1}


def _hook(tapped: TappedLayers, trained: Mapping[str, Tensor]) -> Any:
    def tap(module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
        tapped.calls[module] += 1
        # functional_call may run a module with other tensors in place of its parameters
        own = all(getattr(module, name) is parameter for name, parameter in trained.items())
        if len(args) != 1 or not isinstance(result, Tensor) or not torch.is_grad_enabled() or not own:
            tapped.calls[module] += 1  # counted twice: not usable
            return None
        tapped.layers.append(Layer(module, trained, args[0].detach(), zero_leaf(result)))
        return result + tapped.layers[-1].tap

    return tap
