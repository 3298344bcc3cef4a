"""What measurements of a network have shown about it, so that later ones need not look again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from curvmon.operators.gradient_differences import DifferenceOperator
from curvmon.operators.parameter_hessian import ParameterOperator


@dataclass
class Findings:
    """Of a network with these trainable parameters.

    Attributes:
        names: of the parameters.
        layerwise: whether the trace works layer by layer; None: not tried. `no_layers`: why not, where it should.
        no_differences: why differences of gradients cannot replace second derivatives; None if they may.
        differences_failed: once, for a reason that may pass.
        verdict: of the comparison of differences with second derivatives. `detaches`: it has to be made in every
            measurement, because the loss takes something that depends on the parameters for a constant.
        step: of the last differences.
    """

    names: list[str] = field(default_factory=list)
    layerwise: bool | None = None
    no_layers: str = ""
    no_differences: str | None = None
    differences_failed: bool = False
    verdict: str | None = None
    detaches: bool = False
    step: float | None = None

    def prepare(self, operator: ParameterOperator) -> None:
        """Let the operator go on from what earlier measurements have shown."""
        self.belong_to(operator.names)
        if isinstance(operator, DifferenceOperator):
            operator.verdict, operator.usual_step = self.verdict, self.step

    def belong_to(self, names: Iterable[str]) -> None:
        """Forget what was about other parameters: layers were frozen or unfrozen."""
        names = list(names)
        if names != self.names:
            vars(self).update(vars(Findings(names)))
