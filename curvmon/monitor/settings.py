"""What a monitor measures, and the arguments that can be checked without a Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from curvmon.alerts.rules import AlertRules
from curvmon.errors import InputError
from curvmon.graph.arguments import check_arguments, check_budget, check_integer, check_number
from curvmon.metrics.registry import pair_metric


@dataclass(frozen=True)
class Settings:
    """What to measure, for the whole run.

    Attributes:
        pairs: whether the pairs of layers are measured.
        nodes: names or patterns of nodes; None: the automatic choice.
        output: name of the module that returns the predictions; None: found automatically.
        rtol: relative standard error at which a measurement of pairs stops.
        eigenvalues: number of the largest eigenvalues; 0 for none.
        seed: seed of the random probes.
    """

    pairs: bool = True
    nodes: Sequence[str] | None = None
    output: str | None = None
    rtol: float = 0.05
    eigenvalues: int = 5
    seed: int = 0

    @property
    def only_sharpness(self) -> bool:
        """λ_1 and nothing that takes HVPs of its own."""
        return not self.pairs and self.eigenvalues == 1


def check_settings(
    *,
    nodes: Any,
    metrics: Any,
    eigenvalues: Any,
    probe_size: Any,
    probe_batches: Any,
    data: Any,
    every_n_validations: Any,
    every_n_train_steps: Any,
    initial: Any,
    loss: Any,
    output: Any,
    max_overhead: Any,
    pulse: Any,
    rtol: Any,
    log_pairs: Any,
    heatmaps: Any,
    alerts: Any,
    on_alert: Any,
    seed: Any,
    log_key_prefix: Any,
    verbose: Any,
    strict: Any,
    history_size: Any,
) -> None:
    """Raises InputError: which argument is wrong, and what it must be."""
    counts = {
        "probe_size": probe_size,
        "probe_batches": probe_batches,
        "history_size": history_size,
    }
    for name, value in counts.items():
        check_integer(name, value, "an integer of at least 1", minimum=1)
    intervals = {"every_n_validations": every_n_validations, "every_n_train_steps": every_n_train_steps}
    for name, value in intervals.items():
        if value is not None:
            check_integer(name, value, "None or an integer of at least 1", minimum=1)
    if every_n_validations is None and every_n_train_steps is None:
        raise InputError("every_n_validations=None needs every_n_train_steps: else nothing is measured")
    if not isinstance(pulse, bool):
        check_integer("pulse", pulse, "True, False or an integer of at least 1", minimum=1)
    check_integer("eigenvalues", eigenvalues, "an integer, 0 for none", minimum=0)
    if data not in ("val", "train"):
        raise InputError(f'data must be "val" or "train", not {data!r}')
    if isinstance(metrics, str):
        raise InputError(f"metrics must be a list, [{metrics!r}] say, not {metrics!r}")
    for metric in metrics:
        pair_metric(metric)  # raises for names that are not registered
    if not metrics and not eigenvalues:
        raise InputError("metrics=[] and eigenvalues=0: there is nothing to measure")
    if max_overhead is not None:
        check_number("max_overhead", max_overhead, "None or a share of the training time")
        if max_overhead > 1:
            raise InputError(
                f"max_overhead={max_overhead:g} is more than the training itself; it is a share of it: 0.05 for five "
                "percent, None for no limit"
            )
    switches = {
        "initial": initial,
        "log_pairs": log_pairs,
        "heatmaps": heatmaps,
        "verbose": verbose,
        "strict": strict,
    }
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise InputError(f"{name} must be True or False, not {value!r}")
    if not isinstance(log_key_prefix, str):
        raise InputError(f'log_key_prefix must be a string, "probe/" say, not {log_key_prefix!r}')
    if not isinstance(alerts, (bool, AlertRules)):
        raise InputError(f"alerts must be True, False or AlertRules(...), not {alerts!r}")
    if not (on_alert is None or on_alert in ("stop", "checkpoint") or callable(on_alert)):
        raise InputError(f'on_alert must be a callable, "stop", "checkpoint" or None, not {on_alert!r}')
    if on_alert is not None and alerts is False:
        raise InputError(f"on_alert={on_alert!r} needs alerts, and alerts=False switches them off")
    check_budget(rtol, None, seed)
    check_arguments(nn.Identity(), _nothing if loss is None else loss, nodes, output, 0)


def _nothing(model: Any, batch: Any) -> None:
    """Stands for a loss that is derived from training_step."""
