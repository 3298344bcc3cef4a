"""Forward passes whose graph keeps no activations: it can be looked at, but not differentiated."""

from __future__ import annotations

from typing import Any

import torch


class NotSavedError(RuntimeError):
    """The graph is differentiated after all: the loss takes gradients itself."""


def nothing_saved() -> Any:
    """A context in which operations save nothing for a backward pass."""

    def unpack(nothing: Any) -> Any:
        raise NotSavedError

    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    return hooks(lambda tensor: None, unpack)
