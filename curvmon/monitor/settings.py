"""Checks the arguments of the callback that can be checked without a Trainer."""

from __future__ import annotations

from typing import Any

from torch import nn

from curvmon.alerts.rules import AlertRules
from curvmon.errors import InputError
from curvmon.graph.arguments import check_arguments, check_budget
from curvmon.records import METRICS


def check_settings(**arguments: Any) -> None:
    """Raises InputError: which argument is wrong, and what it must be."""
    for name in ("probe_size", "probe_batches", "every_n_validations", "history_size"):
        if not _is_integer(arguments[name]) or arguments[name] < 1:
            raise InputError(f"{name} must be an integer of at least 1, not {arguments[name]!r}")
    every = arguments["every_n_train_steps"]
    if every is not None and (not _is_integer(every) or every < 1):
        raise InputError(f"every_n_train_steps must be None or an integer of at least 1, not {every!r}")
    if not _is_integer(arguments["eigenvalues"]) or arguments["eigenvalues"] < 0:
        raise InputError(f"eigenvalues must be an integer, 0 for none, not {arguments['eigenvalues']!r}")
    if arguments["data"] not in ("val", "train"):
        raise InputError(f'data must be "val" or "train", not {arguments["data"]!r}')
    if isinstance(arguments["metrics"], str):
        raise InputError(f"metrics must be a list, [{arguments['metrics']!r}] say, not {arguments['metrics']!r}")
    unknown = [metric for metric in arguments["metrics"] if metric not in METRICS]
    if unknown:
        raise InputError(f"no metric {unknown[0]!r}; the metrics are {', '.join(METRICS)}")
    if not arguments["metrics"] and not arguments["eigenvalues"]:
        raise InputError("metrics=[] and eigenvalues=0: there is nothing to measure")
    overhead = arguments["max_overhead"]
    if overhead is not None and (
        isinstance(overhead, bool) or not (isinstance(overhead, (int, float)) and overhead >= 0)
    ):
        raise InputError(f"max_overhead must be None or a share of the training time, not {overhead!r}")
    for name in ("initial", "heatmaps", "verbose", "strict"):
        if not isinstance(arguments[name], bool):
            raise InputError(f"{name} must be True or False, not {arguments[name]!r}")
    if not isinstance(arguments["log_key_prefix"], str):
        raise InputError(f'log_key_prefix must be a string, "probe/" say, not {arguments["log_key_prefix"]!r}')
    if not (isinstance(arguments["log_pairs"], bool) or arguments["log_pairs"] == "auto"):
        raise InputError(f'log_pairs must be True, False or "auto", not {arguments["log_pairs"]!r}')
    if not isinstance(arguments["alerts"], (bool, AlertRules)):
        raise InputError(f"alerts must be True, False or AlertRules(...), not {arguments['alerts']!r}")
    wanted = arguments["on_alert"]
    if not (wanted is None or wanted in ("stop", "checkpoint") or callable(wanted)):
        raise InputError(f'on_alert must be a callable, "stop", "checkpoint" or None, not {wanted!r}')
    check_budget(arguments["rtol"], None, arguments["seed"])
    loss = arguments["loss"]
    check_arguments(nn.Identity(), _nothing if loss is None else loss, arguments["nodes"], arguments["output"], 0)


def _is_integer(value: Any) -> bool:
    """bool is a subclass of int, but True is no count."""
    return isinstance(value, int) and not isinstance(value, bool)


def _nothing(model: Any, batch: Any) -> None:
    """Stands for a loss that is derived from training_step."""
