"""What a loop of one's own logs to, as loggers: a function, a SummaryWriter, a W&B run, an MLflow client.

| `log=` | numbers | pictures | texts of alerts | folder of `history.jsonl` |
|---|---|---|---|---|
| a function of (dict, step) | yes | no | no | none |
| SummaryWriter | yes | yes | yes | its `log_dir` |
| W&B run | yes | yes | yes | its `dir` |
| MLflow client, with an active run | yes | yes | yes | none |
| a logger of Lightning or Fabric | yes | as under Lightning | as under Lightning | its `log_dir` |
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from curvmon.errors import InputError
from curvmon.reporting.dashboards import STEP


def loggers_of(log: Any) -> list[Any]:
    """Loggers for whatever `log` is: one of the table above, a list of them, or None.

    Raises:
        InputError: it is something else, or there is no active MLflow run.
    """
    if log is None:
        return []
    if isinstance(log, (list, tuple)):
        return [logger for each in log for logger in loggers_of(each)]
    names = {base.__name__ for base in type(log).__mro__}
    if "SummaryWriter" in names:
        return [SummaryWriterLogger(log)]
    if type(log).__module__.split(".")[0] == "wandb" and "Run" in names:
        return [WandbRunLogger(log)]
    if "MlflowClient" in names:
        return [MlflowClientLogger(log)]
    if hasattr(log, "log_metrics") and hasattr(log, "save"):
        return [log]
    if callable(log):
        return [FunctionLogger(log)]
    raise InputError(
        "log must be a function of (dict, step), a SummaryWriter, a W&B run, an MlflowClient, a logger of Lightning, "
        f"or a list of these, not {type(log).__name__}"
    )


class FunctionLogger:
    """Gets numbers only."""

    def __init__(self, function: Callable[[dict[str, float], int], Any]) -> None:
        self._function = function

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._function(dict(metrics), step)

    def save(self) -> None:
        return None


class SummaryWriterLogger:
    """TensorBoard, from torch or tensorboardX."""

    acts_as = "TensorBoardLogger"

    def __init__(self, writer: Any) -> None:
        self.experiment = writer
        self.log_dir = str(writer.log_dir if hasattr(writer, "log_dir") else writer.logdir)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for key, value in metrics.items():
            self.experiment.add_scalar(key, value, step)

    def save(self) -> None:
        self.experiment.flush()


class WandbRunLogger:
    """Adds to the row that the loop is about to log, and never moves W&B's own step, which may be the loop's.

    A `run.log` without a step would begin a new row, and W&B drops what the loop logs with an earlier step.
    """

    acts_as = "WandbLogger"

    def __init__(self, run: Any) -> None:
        self.experiment = run
        self.log_dir = str(run.dir)
        self._wandb_init: dict[str, Any] = {}
        self._row: tuple[int, int] | None = None
        """W&B's step and that of the loop, at the last numbers"""

    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        row = self.experiment.step
        if self._row is not None and self._row[0] == row and self._row[1] != step:
            self.experiment.log({}, commit=True)  # the loop has logged nothing since: these would replace the last ones
            row = self.experiment.step
        self.experiment.log({**metrics, STEP: step}, step=row, commit=False)
        self._row = row, step

    def save(self) -> None:
        return None


class MlflowClientLogger:
    """Writes to the run that is active where the monitor is made."""

    acts_as = "MLFlowLogger"

    def __init__(self, client: Any) -> None:
        run = sys.modules["mlflow"].active_run()
        if run is None:
            raise InputError("log is an MlflowClient, and there is no active run: mlflow.start_run() first")
        self.experiment, self.run_id = client, run.info.run_id

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        metric = sys.modules["mlflow"].entities.Metric
        now = int(time.time() * 1000)
        self.experiment.log_batch(self.run_id, [metric(key, value, now, step) for key, value in metrics.items()])

    def save(self) -> None:
        return None
