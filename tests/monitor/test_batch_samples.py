"""What is measured: rows are found, cut, joined, kept and recognised in batches of any make."""

from __future__ import annotations

import copy
import sys
import types
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from curvmon.monitor import batch_samples as module_under_test
from curvmon.monitor.batch_samples import (
    Collector,
    concatenated,
    detached_copy,
    fingerprint,
    first_samples,
    halves,
    sample_count,
    storable_tensors,
    with_tensors,
)


class Point(NamedTuple):
    x: Tensor
    label: str


@dataclass(frozen=True)
class Record:
    x: Tensor
    names: list[str]
    task: str = "digits"


def column(first: int, last: int) -> Tensor:
    """Samples that know their number."""
    return torch.arange(first, last).float().unsqueeze(1).expand(-1, 3).clone()


def made(kind: str, first: int, last: int) -> Any:
    """Samples `first` to `last` in a batch of some make, with names beside the tensors where there is room for them."""
    x, y, names = column(first, last), torch.arange(first, last), [f"{i}.png" for i in range(first, last)]
    return {
        "tensor": lambda: x,
        "tuple": lambda: (x, y),
        "list": lambda: [x, y],
        "dict": lambda: {"x": x, "names": names, "task": "digits"},
        "ordered": lambda: OrderedDict(x=x, names=tuple(names)),
        "mapping": lambda: UserDict(x=x, names=names),
        "read-only": lambda: types.MappingProxyType({"x": x, "y": y}),
        "named tuple": lambda: Point(x, "all"),
        "dataclass": lambda: Record(x, names),
        "nested": lambda: ([x, {"y": y, "path": names}], Record(x, names), None, 3),
        "two dicts": lambda: ({"x": x}, {"y": y}),
    }[kind]()


KINDS = ("tensor", "tuple", "list", "dict", "ordered", "mapping", "read-only", "named tuple", "dataclass", "nested")
every_kind = pytest.mark.parametrize("kind", [*KINDS, "two dicts"])


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, (dict, UserDict, types.MappingProxyType)):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, Record):
        return type(other) is Record and all(map(same, vars(one).values(), vars(other).values()))
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def assert_is(found: Any, wanted: Any) -> None:
    assert same(found, wanted), (found, wanted)
    if not isinstance(wanted, types.MappingProxyType):  # which cannot be copied: a dict in its place
        assert type(found) is type(wanted)


@every_kind
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_the_first_samples(kind: str, count: int) -> None:
    batch = made(kind, 0, 8)
    assert sample_count(batch) == 8
    assert_is(first_samples(batch, count), made(kind, 0, count))
    assert_is(batch, made(kind, 0, 8))
    assert first_samples(batch, 8) is batch and first_samples(batch, 9) is batch


@every_kind
@pytest.mark.parametrize("size", [2, 5, 8])
def test_halves_are_all_of_it(kind: str, size: int) -> None:
    parts = halves(made(kind, 0, size))
    assert parts is not None
    assert_is(parts[0], made(kind, 0, size // 2))
    assert_is(parts[1], made(kind, size // 2, size))
    assert_is(concatenated(*parts), made(kind, 0, size))


@every_kind
@pytest.mark.parametrize("split", [1, 2, 4])
def test_joined_is_both(kind: str, split: int) -> None:
    """Two of the sizes are those of the containers: a pair of dicts is no list of two names."""
    first, second = made(kind, 0, split), made(kind, split, 5)
    assert_is(concatenated(first, second), made(kind, 0, 5))
    assert_is(first, made(kind, 0, split))


def test_what_does_not_fit_is_not_joined() -> None:
    x = torch.zeros(2, 3)
    assert concatenated(x, torch.zeros(2, 4)) is None  # padded to another length
    assert concatenated(x, x.double()) is None
    assert concatenated((x, x), (x,)) is None
    assert concatenated({"x": x}, {"y": x}) is None
    assert concatenated({"x": x, "names": ["a", "b"]}, {"x": x}) is None
    assert concatenated({"x": x, "names": ["a", "b"]}, {"x": x, "names": None}) is None
    assert concatenated((x, torch.tensor(1.0)), (x, torch.tensor(1.0))) is None  # not made of rows
    assert concatenated("names", "names") is None


@pytest.mark.parametrize(
    "batch",
    [
        [torch.zeros(3, 4, 5), torch.zeros(2, 4, 5)],
        ([torch.zeros(3, 4, 4), torch.zeros(3, 5, 5)], [torch.zeros(1, 4), torch.zeros(2, 4)]),
        {"x": torch.zeros(7, 2), "edges": torch.zeros(2, 9), "y": torch.zeros(2)},
        (torch.zeros(4, 2), torch.tensor(0.5)),
        "text",
        [],
    ],
    ids=["sequences", "images", "graph", "scalar", "text", "empty"],
)
def test_a_batch_that_is_not_made_of_rows_is_taken_whole(batch: Any) -> None:
    assert sample_count(batch) is None
    assert first_samples(batch, 1) is batch and halves(batch) is None and concatenated(batch, batch) is None
    collector = Collector(1, 2)
    collector.add(batch)
    collector.add(batch)
    assert collector.complete and len(collector.batches) == 2 and same(collector.batches[0], batch)


def test_one_sample_has_no_halves() -> None:
    assert halves(torch.zeros(1, 3)) is None and halves(torch.zeros(0, 3)) is None


def test_owned_is_a_copy_that_can_be_differentiated() -> None:
    with torch.inference_mode():
        batch = {"x": torch.ones(2, 3), "names": ["a", "b"]}
    kept = detached_copy(batch)
    with torch.inference_mode():
        batch["x"].zero_()  # type: ignore[attr-defined]
    assert kept["x"].eq(1).all() and not kept["x"].is_inference() and kept["names"] == ["a", "b"]
    weight = torch.ones(3, requires_grad=True)
    (kept["x"] @ weight).sum().backward()
    assert weight.grad is not None and weight.grad.eq(2).all()
    assert not detached_copy(torch.ones(2, requires_grad=True)).requires_grad


# ---- collecting ----


@every_kind
@pytest.mark.parametrize("step", [1, 2, 3, 7, 10, 50])
def test_collected_are_the_first_samples_of_several_batches(kind: str, step: int) -> None:
    collector = Collector(10)
    for start in range(0, 60, step):
        assert collector.complete == (start >= 10)
        collector.add(made(kind, start, start + step))
    assert collector.complete
    (found,) = collector.batches
    assert_is(found, made(kind, 0, 10))


def test_collected_is_a_copy() -> None:
    collector, batch = Collector(4), column(0, 3)
    collector.add(batch)
    batch.zero_()
    more = column(3, 6)
    collector.add(more)
    more.zero_()
    assert torch.equal(collector.batches[0], column(0, 4))


def test_several_are_collected_one_after_the_other() -> None:
    collector = Collector(4, count=3)
    for start in range(0, 40, 3):
        collector.add(column(start, start + 3))
    # what is left of a batch that overflowed is not used
    assert [batch[:, 0].tolist() for batch in collector.batches] == [[0, 1, 2, 3], [6, 7, 8, 9], [12, 13, 14, 15]]


def test_a_batch_that_cannot_be_joined_stands_alone() -> None:
    collector = Collector(4, count=2)
    collector.add(torch.zeros(2, 5))
    collector.add(torch.zeros(2, 6))
    collector.add(torch.zeros(2, 7))
    assert [tuple(batch.shape) for batch in collector.batches] == [(2, 5), (2, 6)] and not collector.complete
    collector.add(torch.zeros(3, 6))
    assert [tuple(batch.shape) for batch in collector.batches] == [(2, 5), (4, 6)] and collector.complete


# ---- checkpoints ----


@every_kind
def test_a_fingerprint_is_of_the_tensors(kind: str) -> None:
    batch = made(kind, 0, 4)
    assert fingerprint([batch]) == fingerprint([made(kind, 0, 4)])
    assert fingerprint([batch]) != fingerprint([made(kind, 1, 5)])
    assert fingerprint([batch]) != fingerprint([batch, batch])


def test_a_fingerprint_sees_bits_places_kinds_and_shapes() -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    others = [x.nextafter(torch.tensor(9.0)), x.double(), x.reshape(6, 4), {"x": x}, x.T, -x]
    found = {fingerprint([other]) for other in [x, *others]}
    assert len(found) == 7
    assert fingerprint([x.T]) == fingerprint([x.T.contiguous()])  # how it lies in memory is no matter
    assert fingerprint([x[1:]]) == fingerprint([x[1:].clone()])
    for dtype in (torch.bfloat16, torch.bool, torch.int64, torch.complex64):
        assert fingerprint([x.to(dtype)]) == fingerprint([x.to(dtype).clone()])
    assert fingerprint([torch.zeros(0, 3)]) != fingerprint([torch.zeros(0, 4)])
    assert fingerprint([torch.tensor(1.0)]) != fingerprint([torch.tensor(2.0)])


def test_a_fingerprint_takes_few_calls() -> None:
    """It is taken with every checkpoint: 32 images of 224 pixels are 19 megabytes, hashed as a whole."""
    batch, calls = [torch.zeros(32, 3, 224, 224)], 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        fingerprint(batch)
    finally:
        sys.setprofile(None)
    assert calls < 1000


@every_kind
def test_stored_tensors_come_back_into_another_batch(kind: str) -> None:
    wanted = [made(kind, 0, 4), made(kind, 4, 8)]
    tensors = storable_tensors(wanted)
    assert tensors is not None and all(isinstance(t, Tensor) for row in tensors for t in row)
    found = with_tensors([made(kind, 20, 24), made(kind, 30, 34)], tensors)
    assert found is not None and fingerprint(found) == fingerprint(wanted)
    assert type(found[0]) is type(wanted[0]) or kind == "read-only"


def test_stored_is_a_copy() -> None:
    batch = column(0, 4)
    tensors = storable_tensors([batch])
    batch.zero_()
    assert tensors is not None and torch.equal(tensors[0][0], column(0, 4))


def test_what_is_of_another_kind_is_not_restored() -> None:
    tensors = storable_tensors([(column(0, 4), torch.arange(4))])
    assert tensors is not None
    assert with_tensors([(column(0, 2), torch.arange(2))], tensors) is not None  # another number of samples
    assert with_tensors([column(0, 4)], tensors) is None
    assert with_tensors([(column(0, 4), torch.arange(4).float())], tensors) is None
    assert with_tensors([(column(0, 4)[:, :2], torch.arange(4))], tensors) is None
    assert with_tensors([(column(0, 4), torch.arange(4))] * 2, tensors) is None


def test_large_batches_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = (column(0, 4), torch.arange(4))  # 48 and 32 bytes
    monkeypatch.setattr(module_under_test, "MAX_STORED_BYTES", 80)
    assert storable_tensors([batch]) is not None
    monkeypatch.setattr(module_under_test, "MAX_STORED_BYTES", 79)
    assert storable_tensors([batch]) is None


def test_the_make_of_a_tokenizer() -> None:
    """A BatchEncoding is a mapping, but no dict."""
    encoding = pytest.importorskip("transformers").BatchEncoding

    def batch(first: int, last: int) -> Any:
        return encoding({"input_ids": column(first, last).long(), "labels": torch.arange(first, last)})

    whole = concatenated(batch(0, 2), batch(2, 6))
    assert isinstance(whole, encoding) and torch.equal(whole["labels"], torch.arange(6))
    assert torch.equal(first_samples(whole, 3).input_ids, column(0, 3).long())
    assert len(whole["labels"]) == 6 and torch.equal(copy.copy(whole)["labels"], torch.arange(6))
