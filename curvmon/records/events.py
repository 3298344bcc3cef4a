"""Records of a run: snapshots of everything that was measured, and alerts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from curvmon.records.measurement import Measurement
from curvmon.records.spectrum import Spectrum

Level = Literal["info", "warning", "error"]
PROBE_LOSS = "the loss of the probe batch"
"""in `VitalSigns.not_finite`, in addition to names of parameters and buffers"""


@dataclass(frozen=True)
class Alert:
    """Something that changed in a run, or a rule whose condition holds.

    Attributes:
        kind: "jump", "drift", "intervention" for what is done on purpose, or the name of a rule.
        metric: that changed.
        where: a module, "layer4.conv1", a tensor, a pair of layers, "stem--layer4", or a quantity, "lambda_1".
        before: value before the change; for a rule, its threshold.
        after: value after the change.
        score: size of the change in standard deviations; for a drift, its growth per validation; for a rule,
            |value / threshold|.
        step: when it was measured.
        epoch: when it was measured.
        headline: what happened, where and when, in fewer than 80 characters.
        evidence: what was measured, most important first, with the values before and after.
        suggestion: what to do next; one sentence.
        level: "info" for a notice, "warning" or "error" for an alert.
        others: further pairs or quantities that the same event changed, most affected first.
        causes: what may have caused it, and how probable each is; the most probable first.
        places: modules where it may have happened, and how probable each is; none without a particular place.
    """

    kind: str
    metric: str
    where: str
    before: float
    after: float
    score: float
    step: int
    epoch: int
    headline: str
    evidence: tuple[str, ...] = ()
    suggestion: str = ""
    level: Level = "warning"
    others: tuple[str, ...] = ()
    causes: tuple[tuple[str, float], ...] = ()
    places: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        # names of modules and parameters may have any characters: one line stays one line, in a terminal, too
        object.__setattr__(self, "headline", _one_line(self.headline))
        object.__setattr__(self, "evidence", tuple(_one_line(point) for point in self.evidence))
        object.__setattr__(self, "suggestion", _one_line(self.suggestion))

    @property
    def message(self) -> str:
        """The headline, then the evidence and the suggestion, each on an indented line."""
        return "\n".join([self.headline, *(f"  {line}" for line in self.details)])

    @property
    def details(self) -> tuple[str, ...]:
        """The lines below the headline: evidence, each `- …`, and the suggestion."""
        return (*(f"- {point}" for point in self.evidence), *([self.suggestion] if self.suggestion else []))

    def to_dict(self) -> dict[str, Any]:
        lists = {name: [list(each) for each in getattr(self, name)] for name in ("causes", "places")}
        return {**asdict(self), "evidence": list(self.evidence), "others": list(self.others), **lists}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Alert:
        pairs = {name: tuple((each, share) for each, share in state.get(name, ())) for name in ("causes", "places")}
        return cls(**{**state, "evidence": tuple(state["evidence"]), "others": tuple(state["others"]), **pairs})

    def __str__(self) -> str:
        return self.message


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


@dataclass(frozen=True)
class VitalSigns:
    """What is looked at in every validation, whatever the budget.

    Attributes:
        loss: of the probe batch; NaN where it could not be computed, or where a measurement has it (`Snapshot.loss`).
        weight_norm: ‖θ‖ of the trainable parameters.
        update_norm: ‖θ - θ_before‖, θ_before at the vital signs before these; NaN for the first.
        learning_rate: the largest of all optimizers.
        not_finite: names of parameters and buffers with entries that are NaN or infinite, and were finite before; also
            `PROBE_LOSS`.
        sharpness: λ_1 from a few HVPs that start at the last eigenvector; NaN where there was no time for it.
        sharpness_error: its residual, a bound of its error.
        hvps: Hessian-vector products for it.
    """

    loss: float = math.nan
    weight_norm: float = math.nan
    update_norm: float = math.nan
    learning_rate: float = math.nan
    not_finite: tuple[str, ...] = ()
    sharpness: float = math.nan
    sharpness_error: float = math.nan
    hvps: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "not_finite": list(self.not_finite)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> VitalSigns:
        return cls(**{**state, "not_finite": tuple(state["not_finite"])})


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Everything that was measured at one step of a run.

    Attributes:
        step: on the axis of Lightning's own validation metrics.
        epoch: of the run.
        measurement: of the pairs of layers; None if they were not measured.
        spectrum: without its eigenvectors, which would take the memory of many models.
        seconds: wall-clock time of the measurement.
        overhead: time spent on measurements so far, as a share of the training time.
        skipped: measurements skipped so far to stay within the budget.
        alerts: number of alerts so far in this run, those of this snapshot included.
        vitals: what is looked at in every validation; without measurement and spectrum, nothing else was.
    """

    step: int
    epoch: int
    measurement: Measurement | None = None
    spectrum: Spectrum | None = None
    seconds: float = 0.0
    overhead: float = 0.0
    skipped: int = 0
    alerts: int = 0
    vitals: VitalSigns | None = None

    @property
    def is_full(self) -> bool:
        """More than the vital signs."""
        return self.measurement is not None or self.spectrum is not None

    @property
    def loss(self) -> float:
        """Of the probe batch."""
        record = self.measurement or self.spectrum or self.vitals
        return math.nan if record is None else record.loss

    @property
    def sharpness(self) -> float:
        """λ_1 of the spectrum, or else of the vital signs; NaN if there is none."""
        record = self.spectrum or self.vitals
        return math.nan if record is None else record.sharpness

    @property
    def sharpness_error(self) -> float:
        """A bound of its error."""
        if self.spectrum is not None:
            return self.spectrum.residuals[0].item()
        return math.nan if self.vitals is None else self.vitals.sharpness_error

    @property
    def hvps(self) -> int:
        """Hessian-vector products that were computed."""
        records = (self.measurement, self.spectrum, self.vitals)
        return sum(record.hvps for record in records if record is not None)

    def to_dict(self) -> dict[str, Any]:
        """Lists, dicts, strings and numbers: what `weights_only` loading of a checkpoint accepts.

        Without the names of the parameters, which would be most of it and the same every time.
        """
        return {
            "step": self.step,
            "epoch": self.epoch,
            "measurement": None if self.measurement is None else self.measurement.to_dict(),
            "spectrum": None if self.spectrum is None else {**self.spectrum.to_dict(), "parameters": []},
            "seconds": self.seconds,
            "overhead": self.overhead,
            "skipped": self.skipped,
            "alerts": self.alerts,
            "vitals": None if self.vitals is None else self.vitals.to_dict(),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Snapshot:
        measurement, spectrum, vitals = state["measurement"], state["spectrum"], state["vitals"]
        return cls(
            step=state["step"],
            epoch=state["epoch"],
            measurement=None if measurement is None else Measurement.from_dict(measurement),
            spectrum=None if spectrum is None else Spectrum.from_dict(spectrum),
            seconds=state["seconds"],
            overhead=state["overhead"],
            skipped=state["skipped"],
            alerts=state.get("alerts", 0),  # absent if alerts were off
            vitals=None if vitals is None else VitalSigns.from_dict(vitals),
        )
