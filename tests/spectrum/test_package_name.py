"""`curvmon.spectrum` is a function and a package: the attribute is the function, imports find the package."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest
import torch

import curvmon
from curvmon.spectrum.krylov_space import KrylovSpace
from curvmon.spectrum.stability_limit import StabilityLimit
from tests.helpers.spectrum_cases import Quadratic, energy

PACKAGE = sys.modules["curvmon.spectrum"]
MODULES = sorted(module.name for module in pkgutil.iter_modules(PACKAGE.__path__))


def test_attribute_is_the_function() -> None:
    assert callable(curvmon.spectrum) and isinstance(PACKAGE, ModuleType)
    assert curvmon.spectrum is importlib.import_module("curvmon.spectrum.spectrum").spectrum


def test_import_of_submodules_keeps_the_function() -> None:
    """In a new interpreter, one of them as the first import of all."""
    code = "\n".join(
        f"import curvmon.spectrum.{module}\n"
        f"from curvmon.spectrum import {module}\n"
        f"import sys\n"
        f"assert {module} is sys.modules['curvmon.spectrum.{module}']\n"
        f"assert curvmon.spectrum is sys.modules['curvmon.spectrum.spectrum'].spectrum"
        for module in MODULES
    )
    assert "krylov_space" in MODULES
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_as_finds_the_function() -> None:
    """Documented in `curvmon/spectrum/__init__.py`."""
    with pytest.raises(ImportError):
        exec("import curvmon.spectrum.krylov_space as krylov_space")
    assert PACKAGE.__doc__ is not None and "does not: it looks for `krylov_space` in the function" in PACKAGE.__doc__


def test_records_and_classes_can_be_pickled() -> None:
    result = curvmon.spectrum(Quadratic(torch.arange(30.0)), torch.zeros(1), loss=energy, k=2, density=True)
    again = pickle.loads(pickle.dumps(result))
    assert torch.equal(again.eigenvalues, result.eigenvalues) and repr(again.to_dict()) == repr(result.to_dict())
    limit = pickle.loads(pickle.dumps(StabilityLimit(2.0, "2 / lr")))
    assert limit.limit == 2 and limit.reason == "2 / lr"
    for item in (curvmon.spectrum, curvmon.stability_limit, KrylovSpace):
        assert pickle.loads(pickle.dumps(item)) is item
