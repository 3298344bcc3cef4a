"""One class that is a Callback of every Lightning that is installed.

`pytorch_lightning.Callback` and `lightning.pytorch.Callback` are different classes; some Trainers and every
LightningCLI insist on their own.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

PACKAGES = ("pytorch_lightning", "lightning.pytorch")


def _installed() -> list[Any]:
    return [
        importlib.import_module(name) for name in PACKAGES if importlib.util.find_spec(name.split(".")[0]) is not None
    ]


if TYPE_CHECKING:
    from pytorch_lightning import Callback

    class CallbackBase(Callback):
        pass
else:
    _found = _installed()
    if not _found:
        raise ImportError("CurvatureMonitor needs pytorch-lightning or lightning: pip install pytorch-lightning")
    CallbackBase = type("CallbackBase", tuple(module.Callback for module in _found), {})
