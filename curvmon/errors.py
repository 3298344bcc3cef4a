"""What can go wrong, by kind; every message says what to do about it."""


class CurvmonError(Exception):
    """Base class of all errors that curvmon raises on purpose."""


class InputError(CurvmonError, ValueError):
    """An argument cannot be used: an empty batch, a wrong `batch_dim`, a budget below the minimum."""


class NodeError(InputError):
    """A node (or the output) was not found, never ran, or does not return a floating tensor."""


class LossError(CurvmonError, ValueError):
    """The loss is not a finite scalar that depends on the monitored nodes."""


class DivergedError(LossError):
    """The loss is not finite."""


class DoubleBackwardError(CurvmonError, RuntimeError):
    """An operation between the nodes and the loss cannot be differentiated twice."""


class NonFiniteError(CurvmonError, ArithmeticError):
    """The loss is finite, but its second derivatives are not."""
