"""What a monitor measures, and the arguments that can be checked without a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from curvmon.alerts.rules import AlertRules
from curvmon.errors import InputError
from curvmon.graph.arguments import check_arguments, check_budget, check_integer, check_number
from curvmon.metrics.registry import pair_metric, pair_metric_names


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


@dataclass(frozen=True)
class MonitorSettings:
    """Every setting of a monitor, with its default; `CurvatureMonitor` says what each of them means.

    Raises:
        InputError: which argument is wrong, and what it must be.
    """

    nodes: Any = None
    metrics: Any = None
    eigenvalues: int = 5
    probe_size: int = 32
    probe_batches: int = 1
    data: str = "val"
    every_n_validations: int | None = 1
    every_n_train_steps: int | None = None
    initial: bool = True
    loss: Callable[..., Any] | None = None
    output: str | None = None
    max_overhead: float | None = 0.05
    pulse: bool | int = True
    rtol: float = 0.05
    log_pairs: bool = False
    heatmaps: bool = True
    alerts: bool | AlertRules = True
    on_alert: Any = None
    seed: int = 0
    log_key_prefix: str = ""
    verbose: bool = False
    strict: bool = False
    history_size: int = 1000

    @property
    def pair_metrics(self) -> Sequence[str]:
        return pair_metric_names() if self.metrics is None else self.metrics

    @property
    def measured(self) -> Settings:
        return Settings(
            pairs=bool(self.pair_metrics),
            nodes=[self.nodes] if isinstance(self.nodes, str) else self.nodes,
            output=self.output,
            rtol=self.rtol,
            eigenvalues=self.eigenvalues,
            seed=self.seed,
        )

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_choices(self)


def _check_numbers(s: MonitorSettings) -> None:
    for name in ("probe_size", "probe_batches", "history_size"):
        check_integer(name, getattr(s, name), "an integer of at least 1", minimum=1)
    for name in ("every_n_validations", "every_n_train_steps"):
        if getattr(s, name) is not None:
            check_integer(name, getattr(s, name), "None or an integer of at least 1", minimum=1)
    if s.every_n_validations is None and s.every_n_train_steps is None:
        raise InputError("every_n_validations=None needs every_n_train_steps: else nothing is measured")
    if not isinstance(s.pulse, bool):
        check_integer("pulse", s.pulse, "True, False or an integer of at least 1", minimum=1)
    check_integer("eigenvalues", s.eigenvalues, "an integer, 0 for none", minimum=0)
    if s.max_overhead is not None:
        check_number("max_overhead", s.max_overhead, "None or a share of the training time")
        if s.max_overhead > 1:
            raise InputError(
                f"max_overhead={s.max_overhead:g} is more than the training itself; it is a share of it: 0.05 for five "
                "percent, None for no limit"
            )


def _check_choices(s: MonitorSettings) -> None:
    if s.data not in ("val", "train"):
        raise InputError(f'data must be "val" or "train", not {s.data!r}')
    if isinstance(s.metrics, str):
        raise InputError(f"metrics must be a list, [{s.metrics!r}] say, not {s.metrics!r}")
    for metric in s.pair_metrics:
        pair_metric(metric)  # raises for names that are not registered
    if not s.pair_metrics and not s.eigenvalues:
        raise InputError("metrics=[] and eigenvalues=0: there is nothing to measure")
    for name in ("initial", "log_pairs", "heatmaps", "verbose", "strict"):
        if not isinstance(getattr(s, name), bool):
            raise InputError(f"{name} must be True or False, not {getattr(s, name)!r}")
    if not isinstance(s.log_key_prefix, str):
        raise InputError(f'log_key_prefix must be a string, "probe/" say, not {s.log_key_prefix!r}')
    if not isinstance(s.alerts, (bool, AlertRules)):
        raise InputError(f"alerts must be True, False or AlertRules(...), not {s.alerts!r}")
    if not (s.on_alert is None or s.on_alert in ("stop", "checkpoint") or callable(s.on_alert)):
        raise InputError(f'on_alert must be a callable, "stop", "checkpoint" or None, not {s.on_alert!r}')
    if s.on_alert is not None and s.alerts is False:
        raise InputError(f"on_alert={s.on_alert!r} needs alerts, and alerts=False switches them off")
    check_budget(s.rtol, None, s.seed)
    loss = _nothing if s.loss is None else s.loss
    check_arguments(nn.Identity(), loss, s.measured.nodes, s.output, 0)


def _nothing(model: Any, batch: Any) -> None:
    """Stands for a loss that is derived from training_step."""
