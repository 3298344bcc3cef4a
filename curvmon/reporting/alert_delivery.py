"""Delivers alerts and notices to the Python log and to the loggers of a run, each with prefix, headline and level.

| sink | an alert | a notice |
|---|---|---|
| Python log `curvmon` | at its level | at INFO, with the word notice |
| W&B | `run.alert`, also an email or a message in Slack | nothing |
| TensorBoard | text `curvmon/alert` | text `curvmon/notice` |
| MLflow | artifact `curvmon/alert/….md`, tag `curvmon/alert`: the latest headline | artifact `curvmon/notice/….md` |
| CSV and others | counted in `curvmon/alerts` | nothing |
"""

from __future__ import annotations

import html
import logging
import re
from typing import Any

from curvmon.alerts.wording import shorten
from curvmon.errors import warn
from curvmon.records import Alert
from curvmon.reporting.dashboards import logger_prefix
from curvmon.reporting.loggers import kind_of
from curvmon.reporting.scalars import ALERT, Keys

log = logging.getLogger("curvmon")
NOTICE = "curvmon/notice"
LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
WANDB_LEVELS = {"info": "INFO", "warning": "WARN", "error": "ERROR"}
WANDB_WAIT = 300
"""seconds before W&B sends a second message with the same title"""
WANDB_TITLE = 63
"""characters: W&B raises from 64 on"""
MAX_PREFIX = 20
"""characters of a prefix in a title"""
_MARKDOWN = re.compile(r"[\\`*\[]|(?<![^\W_])_|_(?![^\W_])|^[#+-]")
"""what would be formatting: underscores inside of words, as in `self_attn`, are none"""
_HTML = re.compile(r"<(?=\S)|&(?=[\w#])")
_NOT_IN_A_TAG = re.compile(r"[^A-Za-z0-9_./ -]")


def deliver_alert(loop: Any, alert: Alert, keys: Keys) -> None:
    """On rank 0. A logger that fails is a warning."""
    log.log(LEVELS[alert.level], "%s", "\n  ".join([title(alert, keys), *alert.details]))
    for logger in loop.loggers:
        deliver = _SINKS.get(kind_of(logger))
        try:
            if deliver is not None:
                deliver(logger, alert, keys)
        except Exception as error:
            warn(f"{type(logger).__name__} did not take an alert ({type(error).__name__}: {error})")


def title(alert: Alert, keys: Keys) -> str:
    """`curvmon: …`, `curvmon fold1/: …`, `curvmon fold1/ notice: …`."""
    parts = ["curvmon", shorten(keys.prefix.strip(), MAX_PREFIX), "notice" if is_notice(alert) else ""]
    return f"{' '.join(part for part in parts if part)}: {alert.headline}"


def is_notice(alert: Alert) -> bool:
    return alert.level == "info"


def _to_wandb(logger: Any, alert: Alert, keys: Keys) -> None:
    if is_notice(alert):
        return
    full = title(alert, keys)
    short = full if len(full) <= WANDB_TITLE else full.removeprefix("curvmon ").removeprefix("curvmon: ")
    fits = len(short) <= WANDB_TITLE
    logger.experiment.alert(
        title=shorten(short, WANDB_TITLE),
        text="\n".join([*([] if fits else [alert.headline]), *alert.details]),
        level=WANDB_LEVELS[alert.level],
        wait_duration=WANDB_WAIT,
    )


def _to_tensorboard(logger: Any, alert: Alert, keys: Keys) -> None:
    key = f"{logger_prefix(logger)}{keys(_key(alert))}"
    logger.experiment.add_text(key, markdown(alert, keys), global_step=alert.step)
    logger.save()


def _to_mlflow(logger: Any, alert: Alert, keys: Keys) -> None:
    client, run = logger.experiment, logger.run_id
    if not is_notice(alert):
        client.set_tag(run, _NOT_IN_A_TAG.sub("_", keys(ALERT)), f"{alert.headline} ({alert.level})")
    client.log_text(run, markdown(alert, keys), f"{keys(_key(alert))}/step_{alert.step:08d}_{alert.kind}.md")


_SINKS = {"WandbLogger": _to_wandb, "TensorBoardLogger": _to_tensorboard, "MLFlowLogger": _to_mlflow}


def markdown(alert: Alert, keys: Keys) -> str:
    """The headline in bold, the level, the evidence as a list, the suggestion. Names of layers are no Markdown."""
    parts = [f"**{_escaped(title(alert, keys))}** ({alert.level})"]
    if alert.evidence:
        parts.append("\n".join(f"- {_escaped(point)}" for point in alert.evidence))
    return "\n\n".join([*parts, _escaped(alert.suggestion)]).strip()


def _key(alert: Alert) -> str:
    return NOTICE if is_notice(alert) else ALERT


def _escaped(text: str) -> str:
    text = _HTML.sub(lambda match: html.escape(match[0]), text)
    return _MARKDOWN.sub(lambda match: f"\\{match[0]}", text)
