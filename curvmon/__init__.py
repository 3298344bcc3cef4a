"""Curvature between the layers of a network, measured while it trains."""

from typing import TYPE_CHECKING, Any

from curvmon import closed_form, operators
from curvmon.alerts.change_detector import ChangeDetector
from curvmon.alerts.detector import Sensitivity
from curvmon.alerts.rules import AlertRules
from curvmon.errors import (
    CurvmonError,
    DifferencesError,
    DivergedError,
    DoubleBackwardError,
    InputError,
    LossError,
    NodeError,
    NonFiniteError,
)
from curvmon.monitor.saved_history import load_history
from curvmon.pairs.exact import exact
from curvmon.pairs.measure import measure
from curvmon.pulse import Pulse, pulse
from curvmon.records import (
    Alert,
    AttentionSigns,
    Density,
    ExactMeasurement,
    GroupSpectrum,
    Measurement,
    Pair,
    PulseRecord,
    RunHistory,
    Spectrum,
)
from curvmon.spectrum.spectrum import spectrum
from curvmon.spectrum.stability_limit import StabilityLimit, stability_limit
from curvmon.version import __version__

if TYPE_CHECKING:
    from curvmon.integrations.lightning.callback import CurvatureMonitor
    from curvmon.integrations.plain import Monitor

__all__ = [
    "Alert",
    "AlertRules",
    "AttentionSigns",
    "ChangeDetector",
    "CurvatureMonitor",
    "CurvmonError",
    "Density",
    "DifferencesError",
    "DivergedError",
    "DoubleBackwardError",
    "ExactMeasurement",
    "GroupSpectrum",
    "InputError",
    "LossError",
    "Measurement",
    "Monitor",
    "NodeError",
    "NonFiniteError",
    "Pair",
    "Pulse",
    "PulseRecord",
    "RunHistory",
    "Sensitivity",
    "Spectrum",
    "StabilityLimit",
    "__version__",
    "closed_form",
    "exact",
    "load_history",
    "measure",
    "operators",
    "pulse",
    "spectrum",
    "stability_limit",
]


def __getattr__(name: str) -> Any:
    """The monitors, when they are asked for: importing Lightning takes seconds, and `measure` does not need it."""
    if name == "CurvatureMonitor":
        from curvmon.integrations.lightning.callback import CurvatureMonitor

        return CurvatureMonitor
    if name == "Monitor":
        from curvmon.integrations.plain import Monitor

        return Monitor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
