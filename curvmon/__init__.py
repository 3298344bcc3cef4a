"""Curvature between the layers of a network, measured while it trains."""

from curvmon.curvature import closed_form
from curvmon.curvature.exact import exact
from curvmon.curvature.measure import measure
from curvmon.curvature.spectrum import spectrum
from curvmon.curvature.stability import StabilityLimit, stability_limit
from curvmon.errors import CurvmonError, DoubleBackwardError, InputError, LossError, NodeError, NonFiniteError
from curvmon.types import Density, ExactMeasurement, GroupSpectrum, Measurement, Pair, Spectrum
from curvmon.version import __version__

__all__ = [
    "CurvmonError",
    "Density",
    "DoubleBackwardError",
    "ExactMeasurement",
    "GroupSpectrum",
    "InputError",
    "LossError",
    "Measurement",
    "NodeError",
    "NonFiniteError",
    "Pair",
    "Spectrum",
    "StabilityLimit",
    "__version__",
    "closed_form",
    "exact",
    "measure",
    "spectrum",
    "stability_limit",
]
