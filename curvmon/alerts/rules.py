"""`AlertRules`: what raises an alert: abrupt changes, and fixed rules with thresholds; None or False: off."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from curvmon.errors import InputError


def is_number(value: Any) -> bool:
    """An int or a float; neither a bool nor NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


@dataclass(frozen=True)
class AlertRules:
    """What `CurvatureMonitor` raises alerts for; None or False switches a rule off.

    Raises:
        InputError: a value is of the wrong type or out of range.
    """

    changes: bool = True
    """events and drifts: of losses, learning rate, weights, training data, settings, operations, or the curvature"""
    sensitivity: float = 1.0
    """to changes: 2 halves the evidence that one needs, 0.5 doubles it"""
    edge_of_stability: float | None = 1.0
    """sharpness over the largest stable sharpness of the optimizer; a notice, no alert: most runs get there"""
    far_beyond_stability: float | None = 20.0
    """the same ratio as a warning, if it is also 3 times its median over the last measurements (from four on). A probe
    batch of 32 is sharper than the whole data, so runs that train well reach several times the limit; for training with
    full batches, 1.5 is far"""
    coupling_above: float | None = 1.05
    """a coupling that exceeds this by more than its error; a notice. Above 1 the tensor part, which Gauss-Newton
    misses, contributes; it need not dominate"""
    saddle: float | None = -0.5
    """smallest eigenvalue over λ_1, while the loss stalls"""
    stalled: float = 0.01
    """the loss stalls if it changes by less than this share over `lasting` measurements"""
    rank_collapse: float | None = 1.02
    """mean stable rank between different layers, after it has been at least twice as large; a notice: small networks
    get there by training well"""
    gn_gap_above: float | None = None
    """threshold of the largest GN-Gap"""
    loss_explosion: float | None = 2.0
    """loss of the probe batch over the largest of the last four, if it is also near that of the first measurement"""
    instability: bool = True
    """a step ratio of the pulses that announces an instability; also the notice that the learning rate could be several
    times larger"""
    dead_network: bool = True
    """no coupling is defined any more: the loss does not depend on the layers"""
    not_finite: bool = True
    """loss, parameters or curvature that are NaN or infinite"""
    lasting: int = 3
    """measurements in a row for which a condition has to hold"""

    def __post_init__(self) -> None:
        for name in ("changes", "not_finite", "dead_network", "instability"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} must be True or False, not {getattr(self, name)!r}")
        for name in (
            "edge_of_stability",
            "far_beyond_stability",
            "coupling_above",
            "saddle",
            "rank_collapse",
            "gn_gap_above",
            "loss_explosion",
        ):
            value = getattr(self, name)
            if value is not None and not is_number(value):
                raise InputError(f"{name} must be a number, or None to switch it off, not {value!r}")
        for name in ("sensitivity", "stalled"):
            if not is_number(getattr(self, name)) or not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} must be a positive number, not {getattr(self, name)!r}")
        if not is_number(self.lasting) or not isinstance(self.lasting, int) or self.lasting < 1:
            raise InputError(f"lasting must be an integer of at least 1, not {self.lasting!r}")
