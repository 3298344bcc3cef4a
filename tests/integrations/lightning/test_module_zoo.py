"""Modules as people write them, monitored with default settings: measured correctly, or declined with a reason."""

from __future__ import annotations

import math
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

import curvmon
from curvmon import CurvatureMonitor, CurvmonError
from curvmon.monitor.pairs_and_spectrum import measure_pairs
from curvmon.monitor.settings import Settings
from tests.helpers.lightning_runs import QUIET, assert_same, trained
from tests.helpers.module_zoo import (
    BATCH,
    DECLINED,
    FRAMES,
    MEASURED,
    PARTLY,
    PROBE,
    REGRESSION,
    REGRESSION_VAL,
    WORDS,
    BagOfWords,
    Case,
    Regression,
    SpeechRecogniser,
)


def assert_defined(found: curvmon.Measurement, case: Case) -> None:
    """All finite; where the loss does not couple two layers only R = 0 is, and a note says so."""
    assert found.resonance.isfinite().all() and found.resonance.any()
    coupled = found.resonance > 0
    assert coupled.diagonal().all()
    assert found.coupling[coupled].isfinite().all() and found.stable_rank[coupled].isfinite().all()
    assert found.stable_rank[coupled].min() >= 1 - 1e-6
    if not coupled.all():
        assert any("only R = 0 is defined" in note for note in found.notes)
    if case.gap:
        assert found.gn_gap[coupled].isfinite().all()
    else:
        assert found.gn_gap.isnan().all() and any("gn_gap is NaN" in note for note in found.notes)


LANGUAGE_MODELS = {name for name in MEASURED if "transformers" in name or "language model" in name}
"""they take a second each, the others a few tenths"""
QUICK = [name for name in MEASURED if name not in LANGUAGE_MODELS]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in MEASURED if name in LANGUAGE_MODELS]


def measured_by_hand(module: pl.LightningModule, case: Case) -> curvmon.Measurement:
    """With the bases of a monitor, which are smaller than those of `curvmon.measure`."""
    return measure_pairs(Settings(nodes=case.options.get("nodes")), module, [case.probe_batch()], case.loss)


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_matches_measure_called_by_hand(name: str) -> None:
    """The last measurement is of the final weights, on the first validation samples, with the loss of the step."""
    case = MEASURED[name]
    torch.manual_seed(0)
    module, monitor = case.module(), CurvatureMonitor(**case.options)
    said = trained(module, monitor, case.loaders())
    assert len(said) == len(case.warns) and all(text in line for text, line in zip(case.warns, said)), said
    assert len(monitor.history) == len(monitor.spectra) == 1 + case.initial
    wanted = measured_by_hand(module, case)
    assert_same(monitor.history[-1], wanted)
    for found in monitor.history:
        assert_defined(found, case)
        assert any(case.note in note for note in ("", *found.notes)), found.notes
    for found, spectrum in zip(monitor.history, monitor.spectra):
        assert spectrum.eigenvalues.isfinite().all() and len(spectrum.eigenvalues) == 5
        assert math.isfinite(spectrum.trace) and spectrum.loss == pytest.approx(found.loss, rel=1e-6)


@pytest.mark.parametrize("name", ["regression", "GPT-2 of transformers", "graphs"])
def test_first_measurement_is_of_the_weights_before_the_first_step(name: str) -> None:
    case = MEASURED[name]
    torch.manual_seed(0)
    module, monitor = case.module(), CurvatureMonitor()
    wanted = measured_by_hand(module, case)
    trained(module, monitor, case.loaders())
    assert_same(monitor.history[0], wanted)
    assert not torch.equal(monitor.history[0].resonance, monitor.history[1].resonance)


@pytest.mark.parametrize("name", ["regression", "LSTM", "frozen backbone", "dict batch"])
def test_spectrum_is_that_of_the_trainable_parameters(name: str) -> None:
    case = MEASURED[name]
    torch.manual_seed(0)
    module, monitor = case.module(), CurvatureMonitor(metrics=[], eigenvalues=3)
    trained(module, monitor, case.loaders())
    wanted = curvmon.spectrum(module, case.probe_batch(), loss=case.loss, k=3, rtol=1e-6)
    found = monitor.spectra[-1]
    assert found.parameters == wanted.parameters
    assert found.parameters == tuple(n for n, p in module.named_parameters() if p.requires_grad)
    # an eigenvalue lies within each residual
    assert ((found.eigenvalues - wanted.eigenvalues).abs() <= found.residuals + wanted.residuals + 1e-6).all()


@pytest.mark.parametrize("name", DECLINED)
def test_declined_with_one_warning(name: str) -> None:
    case = DECLINED[name]
    torch.manual_seed(0)
    module, monitor = case.module(), CurvatureMonitor()
    weights = [p.detach().clone() for p in module.parameters()]
    (said,) = trained(module, monitor, case.loaders(), max_epochs=2)
    assert case.reason in said and "raining goes on" in said
    assert not monitor.history and not monitor.spectra
    assert any(not torch.equal(p, w) for p, w in zip(module.parameters(), weights))


@pytest.mark.parametrize("name", PARTLY)
def test_the_measurable_part_is_measured(name: str) -> None:
    case = PARTLY[name]
    torch.manual_seed(0)
    module, monitor = case.module(), CurvatureMonitor()
    (said,) = trained(module, monitor, case.loaders(), max_epochs=2)
    assert said.startswith(f"curvmon: {case.reason}")
    assert len(monitor.snapshots) == 3
    if "eigenvalues" in case.reason:
        assert not monitor.spectra and all(found.resonance.all() for found in monitor.history)
    else:
        assert not monitor.history and all(found.converged.all() for found in monitor.spectra)


@pytest.mark.parametrize(("kind", "data"), [(BagOfWords, WORDS), (SpeechRecogniser, FRAMES)])
def test_operations_without_second_derivative_are_measured(kind: type[pl.LightningModule], data: Any) -> None:
    torch.manual_seed(0)
    module, monitor = kind(), CurvatureMonitor()
    assert not trained(module, monitor, (DataLoader(data, BATCH), DataLoader(data, BATCH)), max_epochs=2)
    assert len(monitor.history) == len(monitor.spectra) == 3
    assert all(found.converged.all() for found in monitor.spectra)


@pytest.mark.parametrize("name", ["GAN", "step draws its batches"])
def test_strict_raises_before_training(name: str) -> None:
    case = DECLINED[name]
    module = case.module()
    weights = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(CurvmonError, match=r"cannot monitor this run: training_step .*pass loss="):
        pl.Trainer(callbacks=[CurvatureMonitor(strict=True)], **QUIET).fit(module, *case.loaders())
    assert all(torch.equal(p, w) for p, w in zip(module.parameters(), weights))


def strategy(name: str) -> Any:
    """One device under the name of a strategy that shards, or of a class derived from it."""
    parent = type(name, (SingleDeviceStrategy,), {})
    return type("Derived", (parent,), {})(device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("FSDPStrategy", "FSDP shards parameters below autograd"),
        ("DeepSpeedStrategy", "DeepSpeed shards parameters below autograd"),
        ("ModelParallelStrategy", "model parallelism"),
    ],
)
def test_sharded_parameters_are_declined(name: str, reason: str) -> None:
    case = MEASURED["regression"]
    options = {"accelerator": "auto", "strategy": strategy(name)}
    monitor = CurvatureMonitor()
    (said,) = trained(Regression(), monitor, case.loaders(), **options)
    assert f"this run is not monitored: {reason}" in said and "use DDP or one device" in said
    assert not monitor.history
    # a loss does not help, and strict means it
    trainer = pl.Trainer(callbacks=[CurvatureMonitor(strict=True, loss=case.loss)], **{**QUIET, **options})
    with pytest.raises(CurvmonError, match=f"cannot monitor this run: {reason[:10]}"):
        trainer.fit(Regression(), *case.loaders())


def test_module_without_training_step_is_declined() -> None:
    from curvmon.integrations.lightning.compatibility import unsupported

    class Nothing(pl.LightningModule):
        pass

    trainer = pl.Trainer(**QUIET)
    assert "the module has no training_step; pass loss=" in (unsupported(trainer, Nothing(), False) or "")
    assert unsupported(trainer, Nothing(), True) is None
    assert unsupported(trainer, Regression(), False) is None


# ---- which samples are measured ----


@pytest.mark.parametrize(("batch", "sanity", "samples"), [(1, 32, 32), (5, 0, 32), (8, 2, 16), (48, 1, 32), (7, 3, 21)])
def test_probe_is_the_first_validation_samples(batch: int, sanity: int, samples: int) -> None:
    """As many as the sanity check passes, if that is half of what was asked for; it is the same for the whole run."""
    torch.manual_seed(0)
    module, monitor = Regression(), CurvatureMonitor(eigenvalues=0, initial=sanity > 0)
    loaders = DataLoader(REGRESSION, BATCH), DataLoader(REGRESSION_VAL, batch)
    assert not trained(module, monitor, loaders, num_sanity_val_steps=sanity)
    rows = [torch.stack(column[:samples]) for column in zip(*REGRESSION_VAL)]
    assert_same(monitor.history[-1], curvmon.measure(module, rows, loss=MEASURED["regression"].loss))
    assert len(monitor.history) == 1 + (sanity > 0)


def test_without_a_first_measurement_the_sanity_check_does_not_count_twice() -> None:
    torch.manual_seed(0)
    module, monitor = Regression(), CurvatureMonitor(eigenvalues=0, initial=False)
    trained(module, monitor, (DataLoader(REGRESSION, BATCH), DataLoader(REGRESSION_VAL, 4)))
    rows = [torch.stack(column[:PROBE]) for column in zip(*REGRESSION_VAL)]
    assert_same(monitor.history[-1], curvmon.measure(module, rows, loss=MEASURED["regression"].loss))


def test_small_validation_set_is_measured_completely_before_the_first_step() -> None:
    torch.manual_seed(0)
    module, monitor = Regression(), CurvatureMonitor(eigenvalues=0)
    assert not trained(module, monitor, (DataLoader(REGRESSION, BATCH), DataLoader(REGRESSION_VAL[:6], 4)))
    rows = [torch.stack(column[:6]) for column in zip(*REGRESSION_VAL)]
    assert_same(monitor.history[-1], curvmon.measure(module, rows, loss=MEASURED["regression"].loss))
    assert len(monitor.history) == 2


def test_probe_from_training_data_and_of_several_batches() -> None:
    torch.manual_seed(0)
    module = Regression()
    train = CurvatureMonitor(data="train", eigenvalues=0, log_key_prefix="train/")
    several = CurvatureMonitor(probe_size=5, probe_batches=3, eigenvalues=0, initial=False)
    trainer = pl.Trainer(callbacks=[train, several], **QUIET)
    trainer.fit(module, DataLoader(REGRESSION, BATCH), DataLoader(REGRESSION_VAL, 8))
    loss = MEASURED["regression"].loss
    first = [torch.stack(column[:BATCH]) for column in zip(*REGRESSION)]
    assert_same(train.history[-1], curvmon.measure(module, first, loss=loss))
    # each of the three is the first five samples of a batch of eight
    parts = [[torch.stack(column[i : i + 5]) for column in zip(*REGRESSION_VAL)] for i in (0, 8, 16)]
    found = [curvmon.measure(module, part, loss=loss) for part in parts]
    mean = torch.stack([m.resonance.square() for m in found]).mean(0).sqrt()
    torch.testing.assert_close(several.history[-1].resonance, mean, rtol=1e-6, atol=0)
