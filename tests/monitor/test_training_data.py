"""What changes the data changes a number of its own; everything else leaves it as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from curvmon.monitor.training_data import MOST_BATCHES, TrainingData

Batch = tuple[Tensor, Tensor]
INPUTS, LABELS = "batch[0]", "batch[1]"


def batches(count: int = 20, seed: int = 0, change: Callable[[Batch], Any] = lambda batch: batch) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        images = torch.randn(64, 3, 4, 4, generator=generator) + 0.5
        made.append(change((images, torch.randint(10, (64,), generator=generator))))
    return made


def signs_of(data: TrainingData, seen: list[Any]) -> dict[tuple[str, str], float]:
    for batch in seen:
        data.observe(batch)
    return data.collect()


def with_past(intervals: int = 4) -> TrainingData:
    data = TrainingData()
    for seed in range(intervals):
        signs_of(data, batches(seed=seed))
    return data


def test_values_of_quiet_data() -> None:
    signs = signs_of(with_past(), batches(seed=9))
    assert signs["inputs rms", INPUTS] == pytest.approx(1.25**0.5, rel=0.02)
    assert signs["inputs mean", INPUTS] == pytest.approx(0.5 / 1.25**0.5, rel=0.05)
    # 64 x 48 values in a batch
    assert signs["inputs spread", INPUTS] == pytest.approx((64 * 48 * 1.25) ** -0.5, rel=0.5)
    assert signs["labels perplexity", LABELS] == pytest.approx(10, rel=0.01)
    assert signs["labels missing", LABELS] == 0 and signs["labels shift", LABELS] < 0.06
    assert signs["batches different", ""] == 1 and signs["batches size", ""] == 64


def test_a_class_that_vanishes_is_counted_once_it_is_expected() -> None:
    def without_three(batch: Batch) -> Batch:
        keep = batch[1] != 3
        return batch[0][keep], batch[1][keep]

    signs = signs_of(with_past(), batches(seed=9, change=without_three))
    assert signs["labels missing", LABELS] == 1 and signs["labels shift", LABELS] > 0.09
    # three batches of 64 hold fewer than 20 of each class: nothing can be said
    assert signs_of(with_past(), batches(3, 9, without_three))["labels missing", LABELS] == 0


def test_the_same_batch_again_and_again() -> None:
    one = batches(1)[0]
    assert signs_of(TrainingData(), [one] * 20)["batches different", ""] == 1 / 20
    twice = [batch for batch in batches(10) for _ in range(2)]
    assert signs_of(TrainingData(), twice)["batches different", ""] == 1 / 2


def test_rescaled_and_inverted_inputs() -> None:
    tripled = signs_of(with_past(), batches(change=lambda batch: (3 * batch[0], batch[1])))
    assert tripled["inputs rms", INPUTS] == pytest.approx(3 * 1.25**0.5, rel=0.02)
    inverted = signs_of(with_past(), batches(change=lambda batch: (-batch[0], batch[1])))
    assert inverted["inputs mean", INPUTS] == pytest.approx(-0.5 / 1.25**0.5, rel=0.05)


def test_batches_of_any_structure() -> None:
    def as_dict(batch: Batch) -> dict[str, Any]:
        return {"x": {"image": batch[0].half()}, "mask": batch[1] > 4, "n": 3, "c": batch[1].to(torch.complex64)}

    signs = signs_of(with_past(), batches(change=as_dict))
    assert signs["labels perplexity", "batch['mask']"] == pytest.approx(2, rel=0.01)
    assert signs["inputs rms", "batch['x']['image']"] == pytest.approx(1.25**0.5, rel=0.02)
    assert not any(name == "batch['c']" for _, name in signs)


def test_many_batches_are_thinned_out() -> None:
    data = TrainingData()
    for batch in batches(10 * MOST_BATCHES):
        data.observe(batch)
    assert MOST_BATCHES < len(data._moments[LABELS]) <= 5 * MOST_BATCHES
    assert data.collect()["batches different", ""] == 1


def test_large_tensors_are_read_in_part() -> None:
    images = torch.zeros(64, 3, 224, 224)
    images[:2] = 1.0
    signs = signs_of(TrainingData(), [images] * 4)
    assert signs["inputs rms", "batch"] == 1.0


class Odd(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("nothing works")


def test_what_cannot_be_read_is_not_watched() -> None:
    data = TrainingData()
    data.observe({"x": torch.ones(3).as_subclass(Odd)})
    assert signs_of(data, batches()) == {}


def test_an_interval_without_batches() -> None:
    assert TrainingData().collect() == {}


def test_the_usual_shares_survive_a_checkpoint() -> None:
    data = with_past()
    again = TrainingData()
    again.load_state_dict(data.state_dict())
    assert signs_of(again, batches(seed=9)) == signs_of(data, batches(seed=9))
