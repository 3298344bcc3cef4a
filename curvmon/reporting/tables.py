"""Records as tidy tables: one row per pair, per eigenvalue or per step. pandas is needed by `to_pandas` alone."""

from __future__ import annotations

import importlib
from functools import singledispatch
from typing import Any

from curvmon.errors import InputError
from curvmon.metrics.registry import pair_metrics
from curvmon.records import Measurement, RunHistory, Spectrum
from curvmon.reporting.scalars import pulse_scalars, scalars

Row = dict[str, Any]


def to_pandas(record: Any) -> Any:
    """The rows of a record as a DataFrame.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        pandas: Any = importlib.import_module("pandas")  # by name: the package has no types
    except ImportError as error:
        raise ImportError("to_pandas needs pandas: pip install pandas") from error
    return pandas.DataFrame(rows(record))


@singledispatch
def rows(record: Any) -> list[Row]:
    """The same columns in the same order in every row that has them."""
    raise InputError(f"no table of a {type(record).__name__}")


@rows.register
def _(record: Measurement) -> list[Row]:
    index = {name: i for i, name in enumerate(record.nodes)}
    matrices = {}
    for spec in pair_metrics():
        matrices[spec.name] = spec.values(record).tolist()
        matrices[f"{spec.name}_stderr"] = spec.stderr(record).tolist()
    table = []
    for pair in record.pairs():
        i, j = index[pair.row], index[pair.col]
        numbers = {name: matrix[i][j] for name, matrix in matrices.items()}
        table.append({"row": pair.row, "col": pair.col, "distance": j - i, **numbers})
    return table


@rows.register
def _(record: Spectrum) -> list[Row]:
    columns = (record.eigenvalues, record.residuals, record.converged)
    largest = zip(*(column.tolist() for column in columns))
    smallest = (record.smallest, record.smallest_residual, record.smallest_converged)
    values = {**{f"lambda_{i}": value for i, value in enumerate(largest, 1)}, "lambda_min": smallest}
    return [
        {"name": name, "eigenvalue": value, "residual": residual, "converged": converged}
        for name, (value, residual, converged) in values.items()
    ]


@rows.register
def _(record: RunHistory) -> list[Row]:
    return _by_step(record, distances=True)


def headline_rows(record: RunHistory) -> list[Row]:
    """One row per step as in `rows`, without what the headline does not need."""
    return _by_step(record, distances=False)


def _by_step(record: RunHistory, distances: bool) -> list[Row]:
    """What is measured twice at a step, by a pulse and a validation, is in one row."""
    by_step: dict[int, Row] = {step: {"step": step, "epoch": 0, "alert": ""} for step in record.steps}
    for alert in record.raised:
        row = by_step[alert.step]
        row["epoch"] = alert.epoch
        if alert.level != "info":
            row["alert"] = "; ".join(filter(None, [row["alert"], alert.headline]))
    for pulse in record.pulses:
        by_step[pulse.step].update(epoch=pulse.epoch, **pulse_scalars(pulse).for_callbacks())
    for snapshot in record.snapshots:
        by_step[snapshot.step].update(epoch=snapshot.epoch, **scalars(snapshot, distances=distances).for_callbacks())
    return list(by_step.values())
