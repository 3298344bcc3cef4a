"""Events in the training data; the held-out samples stay as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.alert_data import without_class
from benchmarks.alert_event import NotApplicableError, Place
from benchmarks.alert_families import SPACE, Batch
from benchmarks.alert_training import Run
from benchmarks.pulse_networks import VOCABULARY


def labels_shuffled(run: Run, random: torch.Generator) -> Place:
    _needs_labels(run)
    run.y = run.y.flatten()[torch.randperm(run.y.numel(), generator=random)].view_as(run.y)
    return None


def class_missing(run: Run, random: torch.Generator) -> Place:
    if run.family.kind == "table":
        raise NotApplicableError("there are no classes")
    label = SPACE if run.family.kind == "text" else int(torch.randint(10, (1,), generator=random))
    run.x, run.y = without_class(run.x, run.y, label)
    return None


def batch_repeated(run: Run, random: torch.Generator) -> Place:
    first: list[Batch] = []

    def corrupt(batch: Batch) -> Batch:
        first.append(batch)
        return first[0]

    run.corrupt.append(corrupt)
    return None


def inputs_rescaled(run: Run, random: torch.Generator) -> Place:
    """Times or divided by three."""
    _needs_numbers(run)
    run.x = run.x * (3.0 if torch.rand((), generator=random) < 0.5 else 1 / 3)
    return None


def inputs_inverted(run: Run, random: torch.Generator) -> Place:
    """Images arrive inverted, columns of a table in another order, and characters with another code."""
    if run.family.kind == "text":
        run.x = (run.x + 7) % VOCABULARY
    elif run.family.kind == "table":
        run.x = run.x.roll(1, 1)
    else:
        run.x = run.x.max() + run.x.min() - run.x
    return None


def inputs_shifted(run: Run, random: torch.Generator) -> Place:
    """By one and a half standard deviations: they are no longer normalized."""
    _needs_numbers(run)
    run.x = run.x + 1.5 * run.x.std()
    return None


def inputs_noisy(run: Run, random: torch.Generator) -> Place:
    """As much noise as there is signal; half of the characters at random."""
    run.corrupt.append(lambda batch: (_noisy(batch[0], 1.0, random), batch[1]))
    return None


def data_decays(run: Run, random: torch.Generator) -> Place:
    """Noise in place of the inputs of a share of the samples, which grows by 8 % per epoch."""
    start = run.epoch

    def corrupt(batch: Batch) -> Batch:
        x, y = batch
        share = min(1.0, 0.08 * (1 + run.epoch - start))
        wrong = torch.rand(len(x), generator=random) < share
        return torch.where(wrong.view(-1, *[1] * (x.dim() - 1)), _noise_like(x, random), x), y

    run.corrupt.append(corrupt)
    return None


def labels_decay(run: Run, random: torch.Generator) -> Place:
    """Labels of other samples for a share of the batch, which grows by 8 % per epoch."""
    _needs_labels(run)
    start = run.epoch

    def corrupt(batch: Batch) -> Batch:
        x, y = batch
        share = min(1.0, 0.08 * (1 + run.epoch - start))
        wrong = torch.rand(y.shape, generator=random) < share
        return x, torch.where(wrong, y.flatten()[torch.randperm(y.numel(), generator=random)].view_as(y), y)

    run.corrupt.append(corrupt)
    return None


def _needs_labels(run: Run) -> None:
    if run.family.accuracy is None and run.family.kind != "table":
        raise NotApplicableError("there are no labels")


def _needs_numbers(run: Run) -> None:
    if run.family.kind == "text":
        raise NotApplicableError("characters have no scale")


def _noise_like(x: Tensor, random: torch.Generator) -> Tensor:
    if x.dtype == torch.long:
        return torch.randint(VOCABULARY, x.shape, generator=random)
    return x.mean() + x.std() * torch.randn(x.shape, generator=random)


def _noisy(x: Tensor, share: float, random: torch.Generator) -> Tensor:
    if x.dtype == torch.long:
        return torch.where(torch.rand(x.shape, generator=random) < share / 2, _noise_like(x, random), x)
    return x + share * x.std() * torch.randn(x.shape, generator=random)
