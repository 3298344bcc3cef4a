"""Imports point one way, tests mirror the package, and the package is what its metadata says."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import curvmon

PACKAGE = Path(curvmon.__file__).parent
ROOT = Path(__file__).parent
TESTS = sorted(ROOT.rglob("*.py"))
LAYERS = [
    "version",
    "errors",
    "numerics",
    "records",
    "isolation",
    "graph",
    "operators",
    "pairs",
    "spectrum",
    "pulse",
    "metrics",
    "alerts",
    "monitor",
    "reporting",
    "recorder",
    "integrations",
]
"""a package may import itself and those before it"""
OUTSIDE = {"__init__", "__main__", "closed_form"}
"""the two entrances, and formulas that nothing else needs"""
UPWARD = {("records/presentation.py", "curvmon.reporting")}
"""the one file that imports something above it, when a record is to be shown"""
TORCH_ONLY = {*LAYERS[: LAYERS.index("pulse") + 1], "alerts"}
LIGHTNING = {"pytorch_lightning", "lightning", "lightning_utilities", "lightning_fabric", "transformers"}
MOST_LINES = 350


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    for name in imported(path) - {name for file, name in UPWARD if file == path.relative_to(PACKAGE).as_posix()}:
        root, *rest = name.split(".")
        if own not in OUTSIDE and root == "curvmon" and rest:
            assert LAYERS.index(rest[0]) <= LAYERS.index(own), f"{path} imports {name}"
        if own in TORCH_ONLY and root not in sys.stdlib_module_names:
            assert root in ("torch", "curvmon"), f"{path} imports {name}"
        assert own == "integrations" or root not in LIGHTNING, f"{path} imports {name}"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tests_share_helpers_only(path: Path) -> None:
    """What two test modules need is in tests/helpers."""
    shared = {name for name in imported(path) if name.split(".")[0] == "tests"}
    assert [name for name in sorted(shared) if not name.startswith("tests.helpers")] == []


def test_tests_mirror_the_package() -> None:
    folders = {path.parent.relative_to(ROOT) for path in TESTS} - {Path(), Path("helpers")}
    assert [folder for folder in sorted(folders) if not (PACKAGE / folder / "__init__.py").exists()] == []


def test_helpers_say_what_they_are_for() -> None:
    helpers = [path for path in (ROOT / "helpers").glob("*.py") if path.name != "__init__.py"]
    assert [path.name for path in helpers if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_importing_curvmon_pulls_in_neither_lightning_nor_loggers() -> None:
    heavy = [
        "pytorch_lightning",
        "lightning",
        "torchmetrics",
        "wandb",
        "tensorboard",
        "torch._dynamo",
        "pandas",
        "matplotlib",
    ]
    heavy += ["curvmon.reporting"]
    code = f"import curvmon, sys; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_exist() -> None:
    assert all(hasattr(curvmon, name) for name in curvmon.__all__)
    assert (PACKAGE / "py.typed").exists()
