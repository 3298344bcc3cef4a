"""Imports point one way, and the package is what its metadata says."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import curvmon

PACKAGE = Path(curvmon.__file__).parent
LAYERS = ["types", "curvature", "tracking", "lightning"]
"""a layer may import those before it"""
BEDROCK = {"types", "errors", "version"}
FOREIGN = {"curvature": {"torch"}}
"""third-party packages a layer may import at the top"""


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
    return names


def layer_of(name: str) -> int:
    return 0 if name in BEDROCK else LAYERS.index(name)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts == ("__init__",):
        return
    own = parts[0]
    for name in imported(path):
        root, *rest = name.split(".")
        if root == "curvmon":
            assert layer_of(rest[0]) <= layer_of(own), f"{path} imports {name}"
        elif own in FOREIGN and root not in sys.stdlib_module_names:
            assert root in FOREIGN[own], f"{path} imports {name}"


def test_importing_curvmon_pulls_in_neither_lightning_nor_loggers() -> None:
    heavy = ["pytorch_lightning", "lightning", "torchmetrics", "wandb", "tensorboard", "torch._dynamo"]
    code = f"import curvmon, sys; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_exist() -> None:
    assert all(hasattr(curvmon, name) for name in curvmon.__all__)
    assert (PACKAGE / "py.typed").exists()
