"""Layers that are linear in their own parameters, f = A(x) θ: what follows from that for second derivatives.

Linear, convolution, the affine part of a normalisation. If such a layer runs once, and nothing else uses its θ, then

    ∂² <c, out> / ∂θ²  =  A^T (∂² <c, out> / ∂f²) A                the network's curvature at f, and nothing else
    ‖d out_i / dθ · s‖²  =  ‖Σ_t g_it a_it^T‖²                     per sample i, from its inputs a and gradients g

so both can be had from a zero tap on f, with the parameters themselves held constant.
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
from curvmon.numerics import gaussian, norm_squared, precise_dtype

_LINEAR_LAYERS = """
    Linear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d BatchNorm1d BatchNorm2d BatchNorm3d
    LayerNorm GroupNorm RMSNorm InstanceNorm1d InstanceNorm2d InstanceNorm3d
"""
LINEAR_IN_THEIR_PARAMETERS = frozenset(getattr(nn, name) for name in _LINEAR_LAYERS.split())
"""these types only: what a subclass does is not known"""
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
MOST_ENTRIES = 2**23
"""numbers that per-sample gradients take at a time"""


class Layer:
    """One layer in one forward pass: what went in, and the tap on what came out."""

    def __init__(self, module: nn.Module, trained: Mapping[str, Tensor], x: Tensor, tap: Tensor) -> None:
        self._module = module
        self._trained = trained
        self._x = x
        self.tap = tap
        self._grams: dict[int, Tensor] = {}

    def tangent(self, entries: Callable[[Tensor], Tensor]) -> Tensor:
        """A(x) z for a random z = entries(θ)."""
        own = dict(self._module.named_parameters(recurse=False))
        z = {name: entries(p) if name in self._trained else torch.zeros_like(p) for name, p in own.items()}
        image: Tensor = functional_call(self._module, z, (self._x,))
        return image

    def pulled_back(self, gradient: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """A(x)^T g: each parameter of the layer, and its gradient."""
        trained = {name: p.detach() for name, p in self._trained.items()}
        found = vjp(lambda p: functional_call(self._module, p, (self._x,)), trained)[1](gradient)[0]
        return ((self._trained[name], g) for name, g in found.items())

    def rows(self, samples: int) -> bool:
        """Whether the first dimension counts samples, or several rows for each."""
        return all(t.ndim > 1 and len(t) and len(t) % samples == 0 for t in (self._x, self.tap))

    def squared_norm(self, gradient: Tensor, samples: int) -> float:
        """Σ_i ‖d<s_i, out_i>/dθ‖² for the gradient of Σ_i <s_i, out_i> by f, its rows the samples."""
        x, g = (t.reshape(samples, len(t) // samples, *t.shape[1:]) for t in (self._x, gradient))
        total = 0.0
        largest = max(x[0].numel() * self._patch, g[0].numel(), sum(p.numel() for p in self._trained.values()))
        step = max(1, MOST_ENTRIES // largest)
        for start in range(0, samples, step):
            total += self._chunk(start, x[start : start + step], g[start : start + step])
        return total

    def positions(self, samples: int) -> int:
        """Places at which the same weights act within a sample (tokens, pixels); 0 if `projections` has no answer."""
        module = self._module
        same = isinstance(module, nn.Linear) or (isinstance(module, _CONVOLUTIONS) and module.groups == 1)
        if not (same and "weight" in self._trained and self.rows(samples) and self._x.ndim == self.tap.ndim):
            return 0
        return self.tap.numel() // (samples * len(self._trained["weight"]))

    def projections(self, samples: int, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A(x) with `width` random outputs, samples x positions x width, and a random matrix, outputs x width.

        The gradient by the weights is Σ_t g_t x_t^T over the positions t. With both its sides projected at random it
        is small, and is had without the gradient itself.
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
        """How many patches a number of the input is part of."""
        module = self._module
        return module.kernel_size[0] * module.kernel_size[1] if isinstance(module, nn.Conv2d) else 1

    def _chunk(self, start: int, x: Tensor, g: Tensor) -> float:
        module = self._module
        if isinstance(module, nn.Linear) and x.ndim > 2:
            return self._outer(start, x.flatten(1, -2), g.flatten(1, -2))
        if isinstance(module, nn.Conv2d) and x.ndim == 5 and _is_plain(module):
            patches = F.unfold(
                x.flatten(0, 1), module.kernel_size, module.dilation, _numbers(module.padding), module.stride
            )
            inputs = patches.reshape(*x.shape[:2], *patches.shape[1:]).transpose(2, 3).flatten(1, 2)
            return self._outer(start, inputs, g.flatten(3).transpose(2, 3).flatten(1, 2))
        trained = {name: p.detach() for name, p in self._trained.items()}

        def pulled_back(one: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
            found: dict[str, Tensor] = vjp(lambda p: functional_call(module, p, (one,)), trained)[1](cotangent)[0]
            return found

        return sum(norm_squared(each) for each in vmap(pulled_back)(x, g).values())

    def _outer(self, start: int, a: Tensor, g: Tensor) -> float:
        """Σ_i ‖Σ_t g_it a_it^T‖², or Σ_i Σ_tu <a_it, a_iu> <g_it, g_iu> where that takes less; and the bias."""
        total = 0.0
        if "weight" in self._trained:
            positions, inputs, outputs = a.shape[1], a.shape[2], g.shape[2]
            if positions * (inputs + outputs) < inputs * outputs:
                if start not in self._grams:  # the same for every cotangent
                    self._grams[start] = torch.bmm(a, a.mT)
                total += (self._grams[start] * torch.bmm(g, g.mT)).sum(dtype=precise_dtype(g)).item()
            else:
                total += norm_squared(torch.bmm(g.mT, a))
        if "bias" in self._trained:
            total += norm_squared(g.sum(1))
        return total


class LayeredGraph(NamedTuple):
    """A loss as a function of taps on its layers, and of those parameters that are in none of them."""

    graph: TappedGraph
    layers: list[Layer]
    rest: list[Tensor]
    samples: int

    def gradients(self, cotangents: Sequence[Tensor]) -> list[Tensor]:
        """J^T c, by the taps of all layers and by the other parameters."""
        return product(self.graph.outputs, [*(layer.tap for layer in self.layers), *self.rest], cotangents)


def _is_plain(module: nn.Conv2d) -> bool:
    return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)


def _numbers(padding: Any) -> tuple[int, ...]:
    return tuple(padding)


class Watched:
    """The layers that ran, in the order of their calls, and which of the parameters are theirs."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.owned: set[str] = set()
        self.calls: Counter[nn.Module] = Counter()

    def odd(self) -> list[nn.Module]:
        """Modules that were called several times, or never, or in a way that is not understood."""
        return [module for module, calls in self.calls.items() if calls != 1]


@contextmanager
def watched_layers(
    model: nn.Module, parameters: Mapping[str, Tensor], shy: Sequence[nn.Module] = ()
) -> Iterator[Watched]:
    """Tap the layers whose trained parameters are all among `parameters`, and hold these constant meanwhile.

    `shy` are modules to leave alone.
    """
    names = {id(p): name for name, p in parameters.items()}
    watched = Watched()
    with ExitStack() as stack:
        for module in model.modules():
            trained = {name: p for name, p in module.named_parameters(recurse=False) if p.requires_grad}
            known = trained and all(id(p) in names for p in trained.values())
            if known and _is_linear(module) and module not in shy:
                watched.owned.update(names[id(p)] for p in trained.values())
                watched.calls[module] = 0
                stack.callback(module.register_forward_hook(_hook(watched, trained), prepend=True).remove)
                for parameter in trained.values():
                    stack.callback(parameter.requires_grad_, True)
                    parameter.requires_grad_(False)
        yield watched


def _is_linear(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
        return False  # normalises by the batch: a sample's own gradient is no function of that sample
    if "forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks:
        return False  # computes something else than its class says: a patch, weight_norm, pruning, a user's hook
    own = {name for name, _ in module.named_parameters(recurse=False)}
    return type(module) in LINEAR_IN_THEIR_PARAMETERS and own <= {"weight", "bias"}


def used_once(loss: Tensor, parameters: Sequence[Tensor]) -> set[int]:
    """Indices of the parameters that enter the graph behind a loss in one place."""
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


def _hook(watched: Watched, trained: Mapping[str, Tensor]) -> Any:
    def tap(module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
        watched.calls[module] += 1
        # functional_call may run a module with something else in the place of its parameters
        own = all(getattr(module, name) is parameter for name, parameter in trained.items())
        if len(args) != 1 or not isinstance(result, Tensor) or not torch.is_grad_enabled() or not own:
            watched.calls[module] += 1  # as good as called twice: not to be understood
            return None
        watched.layers.append(Layer(module, trained, args[0].detach(), zero_leaf(result)))
        return result + watched.layers[-1].tap

    return tap
