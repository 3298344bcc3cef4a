"""What the process of test_accelerator.py runs: `python -m tests.helpers.accelerator_run FILE`. Not a test itself.

The device is registered for a whole process, so all scenarios share one. What they should have seen is said in
test_accelerator.py.
"""

from __future__ import annotations

import copy
import logging
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvmon
from benchmarks.networks import Decoder, classification_loss, next_token_loss
from curvmon import CurvatureMonitor
from curvmon.errors import InputError
from curvmon.records import METRICS
from tests.helpers.kernel_counts import KernelCounts, counted_measurements
from tests.helpers.pretend_accelerator import register, strategy
from tests.helpers.time_limits import no_overhead_limit

SAMPLES, CLASSES, TOKENS, VOCABULARY = 32, 3, 6, 12
Loss = Callable[[Any, Any], Tensor]


class Setting(NamedTuple):
    model: nn.Module
    batch: Any
    loss: Loss


def convolutional(activation: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((3, 4, 1), (4, 6, 2)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), activation()]
    layers += [nn.Flatten(), nn.Linear(96, 12), activation(), nn.Linear(12, CLASSES)]
    return nn.Sequential(*layers)


def images(count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 8, 8, generator=generator), torch.randint(CLASSES, (count,), generator=generator)


def decoder() -> Setting:
    torch.manual_seed(0)
    model = Decoder(layers=2, width=8, heads=2, tokens=TOKENS, vocabulary=VOCABULARY)
    return Setting(model.eval(), torch.randint(VOCABULARY, (SAMPLES, TOKENS + 1)), next_token_loss)


SETTINGS: dict[str, Callable[[], Setting]] = {
    "relu": lambda: Setting(convolutional(nn.ReLU).eval(), images(SAMPLES), classification_loss),
    "silu": lambda: Setting(convolutional(nn.SiLU).eval(), images(SAMPLES), classification_loss),
    "decoder": decoder,
}


def moved(setting: Setting, device: torch.device) -> Setting:
    batch = setting.batch
    batch = batch.to(device) if isinstance(batch, Tensor) else tuple(x.to(device) for x in batch)
    return setting._replace(model=copy.deepcopy(setting.model).to(device), batch=batch)


def measured(setting: Setting) -> dict[str, Tensor]:
    found = curvmon.measure(setting.model, setting.batch, loss=setting.loss)
    errors = {f"{metric} ±": found.stderr[metric] for metric in METRICS}
    return {metric: getattr(found, metric) for metric in METRICS} | errors


def exact(setting: Setting) -> dict[str, Tensor]:
    found = curvmon.exact(setting.model, setting.batch, loss=setting.loss)
    return {metric: getattr(found, metric) for metric in METRICS}


def spectrum(setting: Setting) -> dict[str, Tensor]:
    found = curvmon.spectrum(setting.model, setting.batch, loss=setting.loss, k=3, density=True)
    assert found.density is not None and found.eigenvectors.device == next(setting.model.parameters()).device
    numbers = {name: getattr(found, name) for name in ("smallest", "ggn_eigenvalue", "trace")}
    grid = found.density.smoothed(50, width=0.05)[1]
    return {"eigenvalues": found.eigenvalues, "density": grid} | {n: torch.tensor(x) for n, x in numbers.items()}


def operators(setting: Setting) -> dict[str, Tensor]:
    """Products with a fixed vector."""
    model, batch, loss = setting
    images: dict[str, Tensor] = {}

    def product(operator: Any) -> Tensor:
        vector = torch.linspace(-1, 1, operator.shape[1]).to(operator.device)
        return torch.cat([operator.matvec(vector), operator.matmat(vector.outer(vector[:2])).flatten()]).cpu()

    with curvmon.operators.hessian(model, batch, loss=loss) as operator:
        images["hessian"] = product(operator)
    with curvmon.operators.gauss_newton(model, batch, loss=loss) as operator:
        images["gauss_newton"] = product(operator)
    with curvmon.operators.between_nodes(model, batch, loss=loss) as between:
        ends = between.nodes[0], between.nodes[-1]
        images["H[v, w]"], images["GN[w, v]"] = product(between.hessian[ends]), product(between.gauss_newton[ends].T)
    return images


def like_a_gpu() -> dict[str, Any]:
    """What the pretended device has in common with a real one."""
    x = torch.arange(6.0).reshape(2, 3).to(register())
    column, transposed = x[:, 1], x.t()
    column.add_(10)
    copied = transposed.contiguous()
    copied.zero_()
    state = torch.get_device_module(x.device).get_rng_state()
    draws = [torch.randn(3, device=x.device).cpu() for _ in range(2)]
    torch.get_device_module(x.device).set_rng_state(state)
    with KernelCounts(x.device) as counts:
        found = (x[x > 2].sum() / 2).item() + len(x.view(-1)[:4].tolist())
    return {
        "views share memory": x.cpu().tolist() == [[0, 11, 2], [3, 14, 5]] and column.cpu().tolist() == [11, 14],
        "strides": transposed.stride() == (1, 3) and not transposed.is_contiguous(),
        "draws": torch.equal(torch.randn(3, device=x.device).cpu(), draws[0]) and not torch.equal(*draws),
        "counts": (found, counts.kernels, counts.synchronisations),
    }


FUNCTIONS = {"measure": measured, "exact": exact, "spectrum": spectrum, "operators": operators}


def agreement(function: str, network: str) -> dict[str, Any]:
    """The same on the host and on the device."""
    setting, run = SETTINGS[network](), FUNCTIONS[function]
    return {"host": run(setting), "device": run(moved(setting, register()))}


def passes(setting: Setting) -> float:
    """Kernels of forward and backward, with the attention kernels that a GPU has too."""
    with KernelCounts() as counts:
        setting.loss(setting.model, setting.batch).backward()
    setting.model.zero_grad()
    return float(counts.totals[0])


class Lit(pl.LightningModule):
    """With noise and dropout on the inputs, drawn by the device."""

    def __init__(self, setting: Setting, noise: float) -> None:
        super().__init__()
        self.model, self._loss, self._noise = setting.model, setting.loss, noise

    def training_step(self, batch: Any, index: int) -> Tensor:
        if self._noise:
            batch = [F.dropout(batch[0] + self._noise * torch.randn_like(batch[0]), 0.1), batch[1]]
        loss = self._loss(self.model, batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self._loss(self.model, batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def fit(
    setting: Setting,
    on_device: bool,
    *callbacks: pl.Callback,
    noise: float = 0.0,
    epochs: int = 2,
    make: Callable[..., Lit] = Lit,
    **options: Any,
) -> tuple[pl.Trainer, dict[str, Tensor]]:
    """The Trainer, and the weights in the end."""
    pl.seed_everything(7, verbose=False)
    torch.randn(3, device=register())  # the generators of host and device are not in the same state
    module = make(setting, noise)
    module.train()
    tensors = (setting.batch,) if isinstance(setting.batch, Tensor) else setting.batch
    data: Any = TensorDataset(*tensors)
    collate = (lambda rows: torch.stack([row[0] for row in rows])) if len(tensors) == 1 else None
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_epochs=epochs,
            callbacks=list(callbacks),
            logger=CSVLogger(folder),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            **({"strategy": strategy()} if on_device else {"accelerator": "cpu"}),
        )
        loader = partial(DataLoader, data, batch_size=8, collate_fn=collate)
        trainer.fit(module, loader(shuffle=True), loader(), **options)
    return trainer, {name: value.cpu().clone() for name, value in module.state_dict().items()}


def history(monitor: CurvatureMonitor) -> list[dict[str, Tensor]]:
    return [{metric: getattr(found, metric) for metric in METRICS} for found in monitor.history]


def searches(monitor: CurvatureMonitor) -> list[tuple[Tensor, Tensor]]:
    """Eigenvalues of both ends and trace, with their errors; a search on a device takes other steps than on a CPU."""
    return [
        (
            torch.tensor([*found.eigenvalues.tolist(), found.smallest, found.trace]),
            torch.tensor([*found.residuals.tolist(), found.smallest_residual, found.trace_stderr]),
        )
        for found in monitor.spectra
    ]


def whole_fit(network: str) -> dict[str, Any]:
    """With the monitor as it comes, on the device and on the host; kernels and synchronisations of its measurements."""
    device, found = register(), {}
    monitor, on_host = CurvatureMonitor(), CurvatureMonitor()
    counts = counted_measurements(monitor, device)
    found["weights"] = fit(SETTINGS[network](), True, monitor)[1]
    found["weights without"] = fit(SETTINGS[network](), True)[1]
    fit(SETTINGS[network](), False, on_host)
    found["pass"] = passes(SETTINGS[network]())
    found["counts"] = [one.totals for one in counts]
    found["device"], found["host"] = history(monitor), history(on_host)
    found["searches"] = searches(monitor), searches(on_host)
    return found


def noisy_fit() -> dict[str, Any]:
    """The training step draws from the device's generator, in a measurement too."""
    monitor = CurvatureMonitor()
    weights = fit(SETTINGS["relu"](), True, monitor, noise=0.1)[1]
    without = fit(SETTINGS["relu"](), True, noise=0.1)[1]
    return {"weights": weights, "weights without": without, "made": len(monitor.history)}


def resumed_fit() -> dict[str, Any]:
    """From a checkpoint of the device."""
    whole, first, second = (CurvatureMonitor() for _ in range(3))
    fit(SETTINGS["silu"](), True, whole, epochs=2)
    trainer, _ = fit(SETTINGS["silu"](), True, first, epochs=1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.ckpt")
        trainer.save_checkpoint(path)
        fit(SETTINGS["silu"](), True, second, epochs=2, ckpt_path=path, weights_only=True)
    return {"made": [len(one.history) for one in (whole, first, second)], "history": history(second)}


class KeepsBatchesOnTheHost(Lit):
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch

    def training_step(self, batch: Any, index: int) -> Tensor:
        return super().training_step([x.to(self.device) for x in batch], index)

    def validation_step(self, batch: Any, index: int) -> None:
        assert batch[0].device.type == "cpu"


def batches_on_the_host() -> dict[str, Any]:
    monitor, plain = CurvatureMonitor(), CurvatureMonitor()
    fit(SETTINGS["relu"](), True, monitor, make=KeepsBatchesOnTheHost, epochs=1)
    fit(SETTINGS["relu"](), True, plain, epochs=1)
    return {"host": history(plain), "device": history(monitor)}


def message_of(run: Callable[[Setting], Any], setting: Setting) -> str:
    try:
        run(setting)
    except InputError as error:
        return str(error)
    return "no error"


def mixed_devices() -> dict[str, Any]:
    """What is said when model and batch are on different devices, and whether the model is as it was."""
    there = moved(here := SETTINGS["relu"](), register())
    before = measured(there)
    messages = {
        (name, where): message_of(run, setting)
        for name, run in FUNCTIONS.items()
        for where, setting in {
            "batch on the host": there._replace(batch=here.batch),
            "model on the host": here._replace(batch=there.batch),
        }.items()
    }
    moving = there._replace(batch=here.batch, loss=lambda model, batch: here.loss(model, moved(here, register()).batch))
    return {"messages": messages, "before": before, "after": measured(there), "moved by the loss": measured(moving)}


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"{f} {n}": partial(agreement, f, n) for f in FUNCTIONS for n in SETTINGS},
    **{f"fit {network}": partial(whole_fit, network) for network in SETTINGS},
    "like a GPU": like_a_gpu,
    "noisy fit": noisy_fit,
    "resumed fit": resumed_fit,
    "batches on the host": batches_on_the_host,
    "mixed devices": mixed_devices,
}


def outcome(scenario: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return scenario()
    except Exception:
        return {"traceback": traceback.format_exc()}


def main(file: str) -> None:
    register()  # before the first backward pass, which starts a thread for every device
    torch.set_num_threads(1)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    seen: dict[str, Any] = {}
    with no_overhead_limit():
        for name, scenario in SCENARIOS.items():
            seen[name] = outcome(scenario)
    torch.save(seen, file)


if __name__ == "__main__":
    main(sys.argv[1])
