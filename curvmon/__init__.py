"""Curvature between the layers of a network, measured while it trains."""

from typing import TYPE_CHECKING, Any

from curvmon.curvature import closed_form
from curvmon.curvature.exact import exact
from curvmon.curvature.measure import measure
from curvmon.curvature.spectrum import spectrum
from curvmon.curvature.stability import StabilityLimit, stability_limit
from curvmon.errors import (
    CurvmonError,
    DivergedError,
    DoubleBackwardError,
    InputError,
    LossError,
    NodeError,
    NonFiniteError,
)
from curvmon.tracking.changes import ChangeDetector, Sensitivity
from curvmon.tracking.rules import AlertRules
from curvmon.types import Alert, Density, ExactMeasurement, GroupSpectrum, Measurement, Pair, Spectrum
from curvmon.version import __version__

if TYPE_CHECKING:
    from curvmon.lightning.callback import CurvatureMonitor

__all__ = [
    "Alert",
    "AlertRules",
    "ChangeDetector",
    "CurvatureMonitor",
    "CurvmonError",
    "Density",
    "DivergedError",
    "DoubleBackwardError",
    "ExactMeasurement",
    "GroupSpectrum",
    "InputError",
    "LossError",
    "Measurement",
    "NodeError",
    "NonFiniteError",
    "Pair",
    "Sensitivity",
    "Spectrum",
    "StabilityLimit",
    "__version__",
    "closed_form",
    "exact",
    "measure",
    "spectrum",
    "stability_limit",
]


def __getattr__(name: str) -> Any:
    """The callback, when it is asked for: importing Lightning takes seconds, and `measure` does not need it."""
    if name == "CurvatureMonitor":
        from curvmon.lightning.callback import CurvatureMonitor

        return CurvatureMonitor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
