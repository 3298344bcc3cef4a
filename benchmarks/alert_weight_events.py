"""Events in the network itself: its weights, and what it computes."""

from __future__ import annotations

from itertools import pairwise
from typing import TypeVar

import torch
from torch import nn

from benchmarks.alert_event import NotApplicableError, Place
from benchmarks.alert_networks import Skip
from benchmarks.alert_training import Run

Item = TypeVar("Item")


@torch.no_grad()
def half_zeroed(run: Run, random: torch.Generator) -> Place:
    name, weight = _hidden_weight(run, random)
    weight[torch.rand(weight.shape, generator=random) < 0.5] = 0
    return name


def layer_reinitialized(run: Run, random: torch.Generator) -> Place:
    name, _ = _hidden_weight(run, random)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**31, (1,), generator=random)))
        run.model.get_submodule(name).reset_parameters()  # type: ignore[operator]
    return name


@torch.no_grad()
def weights_noisy(run: Run, random: torch.Generator) -> Place:
    """Half of each tensor's own spread."""
    for parameter in run.model.parameters():
        if parameter.dim() > 1:
            parameter.add_(0.5 * parameter.std() * torch.randn(parameter.shape, generator=random))
    return None


@torch.no_grad()
def overflow(run: Run, random: torch.Generator) -> Place:
    name, weight = _hidden_weight(run, random)
    weight.mul_(1e4)
    return name


@torch.no_grad()
def outputs_saturated(run: Run, random: torch.Generator) -> Place:
    name, weight = _weights(run)[-1]
    weight.mul_(30.0)
    return name


@torch.no_grad()
def units_dead(run: Run, random: torch.Generator) -> Place:
    """The bias in front of an activation that is off for negative inputs."""
    name, layer = _drawn(
        [
            (name, layer)
            for name, layer, activation in _in_front_of_activations(run.model)
            if isinstance(activation, (nn.ReLU, nn.GELU, nn.SiLU)) and getattr(layer, "bias", None) is not None
        ],
        random,
    )
    layer.bias.fill_(-20.0)  # type: ignore[union-attr, operator]
    return name


def layer_grows(run: Run, random: torch.Generator) -> Place:
    """By 5 % per epoch."""
    name, weight = _hidden_weight(run, random)

    @torch.no_grad()
    def grow() -> None:
        weight.mul_(1.05 ** (1 / run.family.steps))

    run.after_step.append(grow)
    return name


@torch.no_grad()
def not_a_number(run: Run, random: torch.Generator) -> Place:
    """Within one step it is in every weight: no place can be seen."""
    _, weight = _hidden_weight(run, random)
    weight.view(-1)[0] = float("nan")
    return None


# ---- the forward pass ----


def statistics_frozen(run: Run, random: torch.Generator) -> Place:
    """As after loading weights without buffers: running statistics at their initial values, and they stay there."""
    norms = [module for module in run.model.modules() if isinstance(module, nn.BatchNorm2d)]
    if not norms:
        raise NotApplicableError("no batch norm")

    def reset() -> None:
        for module in norms:
            module.reset_running_stats()

    run.after_step.append(reset)
    return None


def skip_cut(run: Run, random: torch.Generator) -> Place:
    name, block = _drawn([(n, m) for n, m in run.model.named_modules() if isinstance(m, Skip)], random)
    assert isinstance(block, Skip)
    block.cut()
    return name


def activation_exchanged(run: Run, random: torch.Generator) -> Place:
    """For a tanh."""
    kinds = nn.ReLU, nn.GELU, nn.SiLU
    name, _ = _drawn([(n, m) for n, m in run.model.named_modules() if isinstance(m, kinds)], random)
    run.model.set_submodule(name, nn.Tanh())
    return name


def dropout_raised(run: Run, random: torch.Generator) -> Place:
    layers = [module for module in run.model.modules() if isinstance(module, nn.Dropout)]
    if not layers:
        raise NotApplicableError("no dropout")
    for layer in layers:
        layer.p = 0.8
    return None


# ---- where ----


def _weights(run: Run) -> list[tuple[str, nn.Parameter]]:
    """Matrices and kernels by the name of their module, in the order of the network; the last one is the head's."""
    return [
        (name, parameter)
        for name, module in run.model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.LSTM))
        for parameter in module.parameters(recurse=False)
        if parameter.dim() > 1
    ]


def _hidden_weight(run: Run, random: torch.Generator) -> tuple[str, nn.Parameter]:
    return _drawn(_weights(run)[:-1], random)


def _drawn(candidates: list[tuple[str, Item]], random: torch.Generator) -> tuple[str, Item]:
    if not candidates:
        raise NotApplicableError("there is no such layer")
    return candidates[int(torch.randint(len(candidates), (1,), generator=random))]


def _in_front_of_activations(model: nn.Module) -> list[tuple[str, nn.Module, nn.Module]]:
    """(name, layer, activation): neighbours in a Sequential."""
    found = []
    for outer, module in model.named_modules():
        if isinstance(module, nn.Sequential):
            children = list(module.named_children())
            for (name, layer), (_, activation) in pairwise(children):
                found.append((f"{outer}.{name}" if outer else name, layer, activation))
    return found
