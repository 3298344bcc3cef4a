"""Two monitors with the same keys in one Trainer are an error that says what to do."""

from __future__ import annotations

from curvmon.errors import InputError


def same_prefix(prefix: str) -> InputError:
    example = "fold1/" if prefix != "fold1/" else "fold2/"
    return InputError(
        f"two CurvatureMonitors of one Trainer have the same log_key_prefix, {prefix!r}: one would overwrite the "
        "metrics and the checkpoint state of the other. Give each of them its own: "
        f"CurvatureMonitor(log_key_prefix={example!r})"
    )


class StateKey(str):
    """The state key of a monitor that no Trainer has set up yet.

    Trainer.__init__ looks up each key in a set of those before it, to raise "Found more than one stateful callback":
    before any hook, and without the remedy. Equal keys of two monitors raise `same_prefix` there. In checkpoints, which
    are written after the setup, keys are plain strings.
    """

    def __new__(cls, key: str, owner: object, prefix: str) -> StateKey:
        new = super().__new__(cls, key)
        new._owner, new._prefix = owner, prefix
        return new

    _owner: object
    _prefix: str

    def __eq__(self, other: object) -> bool:
        equal = super().__eq__(other)
        if equal is True and isinstance(other, StateKey) and other._owner is not self._owner:
            raise same_prefix(self._prefix)
        return equal

    __hash__ = str.__hash__
