"""Batches of unusual kinds: kept without touching them, measured, and no obstacle to training or its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from curvmon import CurvatureMonitor
from curvmon.graph.pytree import map_all_tensors
from curvmon.monitor.batch_samples import (
    detached_copy,
    fingerprint,
    first_samples,
    halves,
    sample_count,
    storable_tensors,
    with_tensors,
)
from tests.helpers.lightning_runs import QUIET, trained
from tests.helpers.module_zoo import REGRESSION, Regression

LARGE = 40
"""more than a probe batch has, so that it is cut"""


class Entries(MutableMapping):  # type: ignore[type-arg]
    """A mapping of a user's own, which keeps its entries in an attribute."""

    def __init__(self, **entries: Any) -> None:
        self._entries = entries

    def __getitem__(self, key: str) -> Any:
        return self._entries[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._entries[key] = value

    def __delitem__(self, key: str) -> None:
        del self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def to(self, *args: Any, **kwargs: Any) -> Entries:
        return self


class Graph:
    """A batch that is no container, as torch_geometric's."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.store = {"x": x, "y": y}
        self.itself = self

    def to(self, *args: Any, **kwargs: Any) -> Graph:
        return self


class Stubborn(Entries):
    def __copy__(self) -> Any:
        raise RuntimeError("there is only one")


class Image(Tensor):
    """As torchvision's `tv_tensors`."""


def pair(batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, Graph):
        return batch.store["x"], batch.store["y"]
    x, y = (batch["x"], batch["y"]) if isinstance(batch, Entries) else batch
    if x.is_nested:
        return torch.stack([rows.mean(0) for rows in x.unbind()]), y
    return x.to_dense(), y


class Takes(Regression):
    """Also scribbles on what it is given, and writes down how much that was."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = pair(batch)
        self.sizes.append(len(y))
        y.add_(0.125)
        return F.mse_loss(self(x), y)


KINDS: dict[str, Any] = {
    "sparse": lambda x, y: (x.to_sparse(), y),
    "compressed rows": lambda x, y: (x.to_sparse_csr(), y),
    "nested": lambda x, y: (torch.nested.nested_tensor([r.repeat(1 + i % 3, 1) for i, r in enumerate(x)]), y),
    "jagged": lambda x, y: (
        torch.nested.nested_tensor([r.repeat(1 + i % 3, 1) for i, r in enumerate(x)], layout=torch.jagged),
        y,
    ),
    "own mapping": lambda x, y: Entries(x=x, y=y),
    "object": Graph,
    "uncopyable": lambda x, y: Stubborn(x=x, y=y),
    "subclass": lambda x, y: (x.as_subclass(Image), y),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def collated(kind: str, rows: Any) -> Any:
    return KINDS[kind](*(torch.stack(column) for column in zip(*rows)))


def loaders(kind: str, size: int = LARGE) -> tuple[Any, Any]:
    return tuple(DataLoader(data, size, collate_fn=lambda rows: collated(kind, rows)) for data in (REGRESSION,) * 2)  # type: ignore[return-value]


@kinds
@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested tensors)")
@pytest.mark.parametrize("size", [LARGE, 12], ids=["cut", "joined"])
def test_training_is_unchanged_and_the_batch_is_measured(kind: str, size: int) -> None:
    weights, sizes = [], []
    for monitor in (CurvatureMonitor(eigenvalues=1, heatmaps=False), None):
        torch.manual_seed(0)
        module = Takes()
        if monitor is None:
            pl.Trainer(**QUIET).fit(module, *loaders(kind, size))
        else:
            said = trained(module, monitor, loaders(kind, size))
            if kind == "uncopyable":
                assert len(said) == 1 and "the batches cannot be copied (RuntimeError: there is only" in said[0]
                assert not monitor.history
            else:
                assert not said and len(monitor.history) == len(monitor.spectra) == 2
        weights.append(module.state_dict())
        sizes.append(module.sizes)
    assert sizes[0] == sizes[1]
    assert all(torch.equal(a, b) for a, b in zip(weights[0].values(), weights[1].values()))


@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested tensors)")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "uncopyable"])
def test_checkpoints_can_be_written_and_loaded(kind: str, tmp_path: Path) -> None:
    """A tensor of an unusual kind in a checkpoint cannot be loaded with weights_only; the batch is recognised."""
    path, monitors = tmp_path / "a.ckpt", [CurvatureMonitor(eigenvalues=1, heatmaps=False) for _ in range(2)]
    for epochs, monitor in enumerate(monitors, start=1):
        trainer = pl.Trainer(callbacks=[monitor], **{**QUIET, "max_epochs": epochs})
        resumed: dict[str, Any] = {} if epochs == 1 else {"ckpt_path": path, "weights_only": True}
        trainer.fit(Takes(), *loaders(kind), **resumed)
        trainer.save_checkpoint(path)
    assert len(monitors[1].history) == 3
    fingerprints = [monitor.state_dict()["probe"]["fingerprint"] for monitor in monitors]
    assert fingerprints[0] == fingerprints[1]


def test_a_copy_shares_nothing_with_the_original() -> None:
    for batch in (Entries(x=torch.zeros(4), y=[torch.ones(4)]), Graph(torch.zeros(4), torch.ones(4))):
        before = [tensor for tensor in map_tensors_of(batch)]
        copied = detached_copy(batch)
        for tensor in map_tensors_of(copied):
            tensor.add_(7.0)
        assert all(a is b for a, b in zip(before, map_tensors_of(batch)))
        assert [tensor.sum().item() for tensor in before] == [0.0, 4.0]
        assert type(copied) is type(batch)
    assert copied.itself is copied


def map_tensors_of(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_all_tensors(batch, note)
    return found


def test_mapping_that_cannot_be_copied_is_unchanged() -> None:
    class Shared(Entries):
        def __copy__(self) -> Shared:
            return self

    batch = Shared(x=torch.zeros(8), y=torch.ones(8))
    before = dict(batch)
    with pytest.raises(ValueError, match="a Shared shares its entries with its copies; pass batches as a dict"):
        detached_copy(batch)
    assert first_samples(batch, 4) is batch and halves(batch) is None
    assert all(batch[key] is value for key, value in before.items())


def test_fingerprints_distinguish_sparse_and_nested_tensors() -> None:
    x = torch.eye(3)
    nested = [torch.nested.nested_tensor([x, x[:n]], layout=torch.jagged) for n in (1, 2)]
    batches = [x.to_sparse(), (2 * x).to_sparse(), x.to_sparse_csr(), x.to_sparse_csc(), *nested]
    assert len({fingerprint([batch]) for batch in batches}) == len(batches)
    assert all(fingerprint([batch]) == fingerprint([detached_copy(batch)]) for batch in batches)
    for batch in batches:
        assert sample_count(batch) is None and storable_tensors([batch]) is None
    assert storable_tensors([x.as_subclass(Image)]) is None
    assert with_tensors([nested[0]], [[x]]) is None
