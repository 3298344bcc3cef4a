"""What the processes of test_ddp.py run: `python -m tests.helpers.ddp_run FOLDER PROCESSES`. Not a test itself.

One world of real gloo processes, started by Lightning's own launcher, goes through a list of scenarios; every process
writes what it saw of each into a file of its own. What it should have seen is said in test_ddp.py.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import curvmon.monitor.measurement as runner_module
from curvmon import AlertRules, CurvatureMonitor
from curvmon.integrations.lightning import training_step
from curvmon.monitor.budget import Budget, Plan
from curvmon.operators.node_blocks import GraphOperator
from tests.helpers.time_limits import no_overhead_limit

WIDTH, CLASSES = 24, 4
COLLECTIVES = {name: getattr(dist, name) for name in ("all_reduce", "all_gather", "barrier", "is_initialized")}
DEFAULT_GROUP = dist.distributed_c10d._get_default_group


def samples(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(count, 8, generator=generator), torch.randint(CLASSES, (count,), generator=generator)
    )


def network(kind: str) -> nn.Sequential:
    activation = {"silu": nn.SiLU, "gelu": nn.GELU, "relu": nn.ReLU}[kind.split("-")[0]]
    layers: list[nn.Module] = []
    for i in range(6):
        layers += [nn.Linear(WIDTH if i else 8, WIDTH)]
        if "norm" in kind:
            layers += [nn.BatchNorm1d(WIDTH)]
        layers += [activation()]
        if "dropout" in kind:
            layers += [nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


class Lit(pl.LightningModule):
    """`disturb(module)` is called in every training step, a measurement's included."""

    def __init__(self, kind: str = "silu", disturb: Callable[[Any], None] | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = network(kind)
        self._disturb = disturb

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self._disturb is not None:
            self._disturb(self)
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Products and searches for eigenvalues that this process did itself."""
    work = {"columns": 0, "remainders": 0, "searches": 0}
    originals = GraphOperator.columns_of, GraphOperator.remainders_of, runner_module.measure_spectrum

    def columns(self: Any, requests: Mapping[int, Tensor]) -> Any:
        work["columns"] += sum(z.shape[1] for z in requests.values())
        return originals[0](self, requests)

    def remainders(self: Any, requests: Mapping[int, Tensor]) -> Any:
        work["remainders"] += sum(z.shape[1] for z in requests.values())
        return originals[1](self, requests)

    def spectrum(*args: Any, **kwargs: Any) -> Any:
        work["searches"] += 1
        return originals[2](*args, **kwargs)

    GraphOperator.columns_of, GraphOperator.remainders_of = columns, remainders  # type: ignore[method-assign, assignment]
    runner_module.measure_spectrum = spectrum
    try:
        yield work
    finally:
        GraphOperator.columns_of, GraphOperator.remainders_of, runner_module.measure_spectrum = originals  # type: ignore[method-assign]


class World:
    def __init__(self, folder: Path, processes: int) -> None:
        self.folder = folder
        self.processes = processes

    @property
    def rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", 0))

    def fit(
        self,
        module: Lit,
        *callbacks: Any,
        epochs: int = 1,
        resume: str | None = None,
        validation: Any = None,
        save: str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """What happened, as this process saw it."""
        pl.seed_everything(7, verbose=False)
        options = {"num_sanity_val_steps": 0, "enable_checkpointing": False, **options}
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=self.processes,
            strategy="ddp",
            max_epochs=epochs,
            callbacks=list(callbacks),
            default_root_dir=self.folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        validation = DataLoader(samples(24, 3), batch_size=8) if validation is None else validation
        with warnings.catch_warnings(record=True) as caught, counted() as work:
            warnings.simplefilter("always")
            trainer.fit(module, DataLoader(samples(48, 2), batch_size=8, shuffle=True), validation, ckpt_path=resume)
        if save is not None:
            trainer.save_checkpoint(self.folder / save)
        return {
            "rank": trainer.global_rank,
            "finished": trainer.state.finished,
            "epochs": trainer.current_epoch,
            "steps": trainer.global_step,
            "weights": {name: value.clone() for name, value in module.state_dict().items()},
            "metrics": dict(trainer.callback_metrics),
            "warnings": [str(w.message) for w in caught if "curvmon" in str(w.message)],
            "work": work,
            "restored": all(getattr(dist, name) is function for name, function in COLLECTIVES.items())
            and dist.distributed_c10d._get_default_group is DEFAULT_GROUP,
            "monitors": [
                {
                    "history": [snapshot.to_dict() for snapshot in monitor.snapshots if snapshot.is_full],
                    "vitals": [snapshot.to_dict()["vitals"] for snapshot in monitor.snapshots],
                    "probe": monitor.state_dict()["probe"],
                    "start": monitor.state_dict()["start"],
                    "validations": monitor.state_dict()["validations"],
                    "skipped": monitor.state_dict()["budget"]["skipped"],
                }
                for monitor in callbacks
                if isinstance(monitor, CurvatureMonitor)
            ],
        }


# ---- scenarios ----


def measured(kind: str, **options: Any) -> Callable[[World], dict[str, Any]]:
    """One measurement, on the final weights."""
    return lambda world: world.fit(Lit(kind), CurvatureMonitor(initial=False, **options))


class Failing:
    """Fails in the measurements with these numbers, in the processes with these ranks."""

    def __init__(self, ranks: list[int], at: list[int], error: Exception) -> None:
        self._ranks, self._at, self._error = ranks, at, error
        self.monitor: CurvatureMonitor | None = None

    def __call__(self, module: Any) -> None:
        assert self.monitor is not None
        if not module.training and self.monitor._validations in self._at and dist.get_rank() in self._ranks:
            raise self._error


def failing(kind: str, where: list[int], error: Exception, **options: Any) -> Callable[[World], dict[str, Any]]:
    """Four validations; the second and the third cannot be measured somewhere, the fourth can."""

    def scenario(world: World) -> dict[str, Any]:
        fault = Failing(where, [2, 3], error)
        fault.monitor = CurvatureMonitor(initial=False, **options)
        return world.fit(Lit(kind, fault), fault.monitor, epochs=4)

    return scenario


def failing_product(world: World) -> dict[str, Any]:
    """The graph is there; one product of the first process fails, while the second searches for eigenvalues."""
    original = GraphOperator.remainders_of
    monitor = CurvatureMonitor(initial=False, eigenvalues=2)

    def remainders(self: Any, requests: Mapping[int, Tensor]) -> Any:
        if monitor._validations == 1 and world.rank == 0:
            raise RuntimeError("a broken product")
        return original(self, requests)

    GraphOperator.remainders_of = remainders  # type: ignore[method-assign]
    try:
        return world.fit(Lit(), monitor, epochs=2)
    finally:
        GraphOperator.remainders_of = original  # type: ignore[method-assign]


def unprepared(rank: int) -> Callable[[World], dict[str, Any]]:
    """One process fails before the first measurement has begun there; another has begun to measure."""

    def scenario(world: World) -> dict[str, Any]:
        original = training_step.frozen_trainer_state
        monitor = CurvatureMonitor(initial=False, eigenvalues=0)

        def frozen_trainer_state(trainer: Any) -> Any:
            if monitor._validations == 1 and world.rank == rank:
                raise RuntimeError("not prepared")
            return original(trainer)

        training_step.frozen_trainer_state = frozen_trainer_state
        try:
            return world.fit(Lit(), monitor, epochs=2)
        finally:
            training_step.frozen_trainer_state = original

    return scenario


class Loose:
    """A batch that is no container."""

    def __init__(self, rows: list[Any]) -> None:
        self.both = [torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])]

    def __getitem__(self, index: int) -> Tensor:
        return self.both[index]


def loose(world: World) -> dict[str, Any]:
    class Sized(Lit):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=12)

    validation = DataLoader(samples(24, 3), batch_size=12, collate_fn=Loose)
    return world.fit(Sized(), CurvatureMonitor(initial=False, eigenvalues=2), validation=validation)


def alerted(on_alert: Any, writable: bool = True) -> Callable[[World], dict[str, Any]]:
    """Every network has a gap: an alert at the first of three validations."""

    def scenario(world: World) -> dict[str, Any]:
        rules = AlertRules(changes=False, gn_gap_above=1e-9, lasting=1)
        monitor = CurvatureMonitor(initial=False, eigenvalues=0, alerts=rules, on_alert=on_alert)
        folder = world.folder / ("alerts" if writable else "a file")
        if not writable and world.rank == 0:
            folder.touch()
        found = world.fit(
            Lit(), monitor, ModelCheckpoint(folder, save_top_k=0, save_last=False), epochs=3, enable_checkpointing=True
        )
        written = sorted(path.name for path in folder.glob("*.ckpt")) if writable else []
        return {**found, "alerts": [alert.kind for alert in monitor.alerts], "written": written}

    return scenario


def not_finite(world: World) -> dict[str, Any]:
    """The loss is NaN in the second measurement, everywhere."""
    monitor = CurvatureMonitor(initial=False, eigenvalues=2)

    class Lost(Lit):
        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            return loss * float("nan") if not self.training and monitor._validations == 2 else loss

    return world.fit(Lost(), monitor, epochs=3)


class Stream(IterableDataset):  # type: ignore[type-arg]
    """As many batches as this process is given; none has a length."""

    def __init__(self, counts: list[int]) -> None:
        self._counts = counts

    def __iter__(self) -> Iterator[Any]:
        everything = samples(8 * max(self._counts), 3)
        for i in range(self._counts[dist.get_rank()]):
            yield everything[8 * i : 8 * i + 8]


def unequal(counts: list[int]) -> Callable[[World], dict[str, Any]]:
    def scenario(world: World) -> dict[str, Any]:
        class Local(Lit):
            def validation_step(self, batch: Any, batch_idx: int) -> None:
                self.log("val_loss", self.loss(batch))  # not synchronised: processes see different numbers of batches

        validation = DataLoader(Stream(counts), batch_size=None)
        return world.fit(
            Local(), CurvatureMonitor(initial=False, eigenvalues=2), epochs=2, validation=validation,
            use_distributed_sampler=False,
        )  # fmt: skip

    return scenario


class ByRank:
    """A batch sampler of another length on every process."""

    def __init__(self, counts: list[int]) -> None:
        self._counts = counts

    def __len__(self) -> int:
        return self._counts[dist.get_rank()]

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(8 * i, 8 * i + 8)) for i in range(len(self))])


def unequal_sized(counts: list[int]) -> Callable[[World], dict[str, Any]]:
    """The same with lengths that Lightning sees: a process without any skips its validation altogether."""

    def scenario(world: World) -> dict[str, Any]:
        class Local(Lit):
            def validation_step(self, batch: Any, batch_idx: int) -> None:
                self.log("val_loss", self.loss(batch))

        module = Local()
        module.allow_zero_length_dataloader_with_multiple_devices = True
        validation = DataLoader(samples(8 * max(counts), 3), batch_sampler=ByRank(counts))
        return world.fit(
            module, CurvatureMonitor(initial=False, eigenvalues=2), epochs=2, validation=validation,
            use_distributed_sampler=False,
        )  # fmt: skip

    return scenario


class GatheringLit(Lit):
    """A loss over the samples of all processes, as contrastive losses are."""

    def loss(self, batch: Any) -> Tensor:
        if not self.training and not self.trainer.training:
            return super().loss(batch)
        logits, labels = self.all_gather((self.model(batch[0]), batch[1]), sync_grads=True)
        share = self.all_gather(1.0)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * share.mean()


def gathering(world: World) -> dict[str, Any]:
    return world.fit(GatheringLit(), CurvatureMonitor(eigenvalues=2, every_n_train_steps=3), epochs=1)


def reducing(how: str) -> Callable[[World], dict[str, Any]]:
    """A collective in the training step: by its name in torch.distributed, imported, or only if that is initialised."""

    def disturb(module: Any) -> None:
        value = torch.ones(())
        if how == "attribute":
            dist.all_reduce(value)
        elif how == "imported":
            all_reduce(value)
        elif dist.is_available() and dist.is_initialized():
            dist.all_reduce(value)

    def scenario(world: World) -> dict[str, Any]:
        found = world.fit(Lit(disturb=disturb), CurvatureMonitor(eigenvalues=2), epochs=1)
        value = torch.ones(())
        dist.all_reduce(value)
        return {**found, "reduced": value.item()}

    return scenario


def undisturbed(world: World) -> dict[str, Any]:
    """With and without."""
    kind = "gelu-norm-dropout"
    return {
        "without": world.fit(Lit(kind), epochs=2),
        "with": world.fit(Lit(kind), CurvatureMonitor(every_n_train_steps=2, eigenvalues=2), epochs=2),
    }


def statistics(world: World) -> dict[str, Any]:
    """BatchNorm without synchronisation: after a training step its running statistics differ between processes."""
    return world.fit(Lit("silu-norm"), CurvatureMonitor(initial=False, eigenvalues=3), limit_val_batches=0)


def budget(world: World) -> dict[str, Any]:
    """No allowance; the second process believes that it has plenty. A second passes whenever a clock is read."""
    monitor = CurvatureMonitor(initial=False, eigenvalues=2, max_overhead=1e-9)
    seconds = itertools.count()
    monitor._recorder.budget = Budget(1e-9, 1e-6 if world.rank == 0 else 1e6, clock=lambda: float(next(seconds)))
    return world.fit(Lit(), monitor, epochs=3)


def share(world: World) -> dict[str, Any]:
    """All, nothing, half for the first process; the second would rather do the opposite."""
    monitor = CurvatureMonitor(initial=False, eigenvalues=2)
    plans = iter([1.0, 0.0, 0.5] if world.rank == 0 else [0.0, 1.0, 0.0])
    monitor._recorder.budget.plan = lambda: Plan(next(plans))  # type: ignore[method-assign]
    return world.fit(Lit(), monitor, epochs=3)


class Kept(pl.Callback):
    """Every batch of this process, with the weights before and after it."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append([[part.clone() for part in batch], cloned(pl_module)])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.batches[-1].append(cloned(pl_module))


def cloned(module: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def pulses(kind: str, **options: Any) -> Callable[[World], dict[str, Any]]:
    """A pulse at every second step; three steps an epoch."""

    def scenario(world: World) -> dict[str, Any]:
        monitor, kept = CurvatureMonitor(initial=False, metrics=[], eigenvalues=1, pulse=2), Kept()
        found = world.fit(Lit(kind), monitor, kept, epochs=4, **options)
        records = [record.to_dict() for record in monitor.pulses]
        plain = world.fit(Lit(kind), epochs=4, **options)
        return {**found, "pulses": records, "batches": kept.batches, "without": plain["weights"]}

    return scenario


def failing_pulses(world: World) -> dict[str, Any]:
    """The second process can take the first pulse alone."""
    monitor = CurvatureMonitor(initial=False, metrics=[], eigenvalues=1, pulse=2)

    def disturb(module: Any) -> None:
        stepping = module.trainer.optimizers[0].step.__name__ != "_refuse"  # inside a pulse it must not
        if world.rank and monitor.pulses and module.training and not stepping:
            raise ValueError("only here")

    found = world.fit(Lit(disturb=disturb), monitor, epochs=4)
    return {**found, "pulses": [record.to_dict() for record in monitor.pulses]}


def early_stopping(world: World) -> dict[str, Any]:
    stop = EarlyStopping("curvmon/lambda_1", mode="min", patience=1, min_delta=1e9)
    return world.fit(Lit(), CurvatureMonitor(eigenvalues=2), stop, epochs=6)


def two_monitors(world: World) -> dict[str, Any]:
    return world.fit(
        Lit(),
        CurvatureMonitor(initial=False, nodes=["model.0", "model.2"], eigenvalues=0),
        CurvatureMonitor(initial=False, metrics=[], eigenvalues=2, log_key_prefix="train/", data="train"),
    )


def resumed(world: World) -> dict[str, Any]:
    """Two epochs, and two more from a checkpoint with a fresh monitor; beside it four in one go."""
    options: dict[str, Any] = {"initial": False, "eigenvalues": 2}
    first = world.fit(Lit(), CurvatureMonitor(**options), epochs=2, save="resumed.ckpt")
    path = str(world.folder / "resumed.ckpt")
    second = world.fit(Lit(), CurvatureMonitor(**options), epochs=4, resume=path)
    return {"first": first, "second": second, "whole": world.fit(Lit(), CurvatureMonitor(**options), epochs=4)}


def unpicklable(world: World) -> dict[str, Any]:
    """Batches with something in them that cannot be sent to other processes."""

    def collate(rows: list[Any]) -> list[Any]:
        return [torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows]), lambda: None]

    validation = DataLoader(samples(24, 3), batch_size=8, collate_fn=collate)
    return world.fit(Lit(), CurvatureMonitor(initial=False, eigenvalues=2), validation=validation)


def alone(world: World) -> dict[str, Any]:
    """After DDP, the first process goes on by itself: torch.distributed is still there, but nobody answers."""
    if world.rank:
        return {}
    monitor = CurvatureMonitor(initial=False, eigenvalues=2)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy="auto", max_epochs=1, callbacks=[monitor], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Lit(), DataLoader(samples(48, 2), batch_size=8), DataLoader(samples(24, 3), batch_size=8))
    return {"history": [snapshot.to_dict() for snapshot in monitor.snapshots]}


OUT_OF_MEMORY = RuntimeError("DefaultCPUAllocator: can't allocate memory: out of memory (simulated)")
SCENARIOS: dict[int, dict[str, Callable[[World], dict[str, Any]]]] = {
    2: {
        "silu": measured("silu", eigenvalues=3),
        "relu": measured("relu", eigenvalues=3),
        "pairs": measured("gelu", eigenvalues=0),
        "batches": measured("silu", eigenvalues=0, probe_batches=2, probe_size=8),
        "error": failing("silu", [1], ValueError("only here"), metrics=[], eigenvalues=2),
        "error_of_the_first": failing("silu", [0], ValueError("only here"), eigenvalues=0),
        "error_in_the_search": failing("silu", [1], ValueError("only here"), eigenvalues=2),
        "memory": failing("silu", [1], OUT_OF_MEMORY, metrics=[], eigenvalues=2),
        "failing_product": failing_product,
        "unprepared": unprepared(1),
        "first_unprepared": unprepared(0),
        "loose": loose,
        "alert_stop": alerted("stop"),
        "alert_checkpoint": alerted("checkpoint"),
        "alert_unwritable": alerted("checkpoint", writable=False),
        "not_finite": not_finite,
        "unequal": unequal([3, 1]),
        "second_without": unequal([2, 0]),
        "first_without": unequal([0, 2]),
        "sized_without": unequal_sized([2, 0]),
        "gathering": gathering,
        "reducing": reducing("attribute"),
        "reducing_imported": reducing("imported"),
        "reducing_guarded": reducing("guarded"),
        "undisturbed": undisturbed,
        "budget": budget,
        "share": share,
        "early_stopping": early_stopping,
        "two_monitors": two_monitors,
        "pulses": pulses("silu-norm"),
        "pulses_accumulated": pulses("silu", accumulate_grad_batches=3),
        "failing_pulses": failing_pulses,
        "resumed": resumed,
        "unpicklable": unpicklable,
        "alone": alone,
    },
    3: {
        "silu": measured("silu", eigenvalues=3),
        "relu": measured("relu", eigenvalues=3),
        "pairs": measured("gelu", eigenvalues=0),
        "statistics": statistics,
        "error": failing("silu", [0], ValueError("only here"), eigenvalues=2),
        "error_in_the_search": failing("silu", [2], ValueError("only here"), eigenvalues=2),
    },
}


def main(folder: Path, processes: int, only: list[str]) -> None:
    world = World(folder, processes)
    for name, scenario in SCENARIOS[processes].items():
        if only and name not in only:
            continue
        began = time.perf_counter()
        found: dict[str, Any]
        try:
            found = scenario(world)
        except Exception:
            found = {"traceback": traceback.format_exc()}
        found["seconds"] = time.perf_counter() - began
        torch.save(found, folder / f"{name}-{world.rank}.pt")
        if world.rank == 0:
            print(f"{name}: {found['seconds']:.1f} s", found.get("traceback", ""), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with no_overhead_limit():
        main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
