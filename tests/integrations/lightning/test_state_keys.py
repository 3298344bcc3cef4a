"""Two monitors of one Trainer need different prefixes: our own error says so, whichever Lightning is installed."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning as pl
import torch

from curvmon import CurvatureMonitor, InputError
from tests.helpers.lightning_runs import QUIET
from tests.helpers.lightning_smoke import module_of

packages = pytest.mark.parametrize("package", [pl, lightning.pytorch], ids=["pytorch_lightning", "lightning"])
REMEDY = r"the same log_key_prefix, '{}'.*CurvatureMonitor\(log_key_prefix='{}'\)"


def monitor(prefix: str = "") -> CurvatureMonitor:
    return CurvatureMonitor(log_key_prefix=prefix, metrics=[], eigenvalues=1, initial=False, heatmaps=False)


@packages
@pytest.mark.parametrize(("prefix", "example"), [("", "fold1/"), ("fold1/", "fold2/")])
def test_equal_prefixes_are_an_error_of_our_own(package: Any, prefix: str, example: str) -> None:
    with pytest.raises(InputError, match=REMEDY.format(prefix, example)):
        package.Trainer(callbacks=[monitor(prefix), monitor(prefix)], **QUIET)


@packages
def test_a_monitor_that_is_added_later_is_found_at_setup(package: Any) -> None:
    """By `configure_callbacks`, or by hand: Lightning does not look at these, and one would overwrite the other."""
    trainer = package.Trainer(callbacks=[monitor()], **QUIET)
    trainer.callbacks.append(monitor())
    with pytest.raises(InputError, match=REMEDY.format("", "fold1/")):
        trainer.fit(module_of(package)())

    class Configured(module_of(package)):  # type: ignore[misc]
        def configure_callbacks(self) -> list[Any]:
            return [monitor("a/"), monitor("a/")]

    with pytest.raises(InputError, match=REMEDY.format("a/", "fold1/")):
        package.Trainer(**QUIET).fit(Configured())


@packages
def test_different_prefixes_keep_their_states_apart(package: Any, tmp_path: Path) -> None:
    first, second = monitor(), monitor("fold1/")
    trainer = package.Trainer(callbacks=[first, second], **QUIET)
    trainer.fit(module_of(package)())
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    states = torch.load(tmp_path / "two.ckpt", weights_only=True)["callbacks"]
    assert {key for key in states if "CurvatureMonitor" in key} == {"CurvatureMonitor", "CurvatureMonitor[fold1/]"}
    resumed = monitor("fold1/")
    package.Trainer(callbacks=[resumed], **{**QUIET, "max_epochs": 2}).fit(
        module_of(package)(), ckpt_path=tmp_path / "two.ckpt", weights_only=True
    )
    assert len(resumed.spectra) > len(second.spectra) > 0


def test_keys_are_strings_wherever_they_are_used() -> None:
    one, other = monitor("a/"), monitor("b/")
    assert one.state_key == one.state_key == "CurvatureMonitor[a/]" != other.state_key
    assert {"CurvatureMonitor[a/]": 1}[one.state_key] == 1
    assert {one.state_key: 2}["CurvatureMonitor[a/]"] == 2
    for twin in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert str(twin.state_key) == "CurvatureMonitor[a/]"
