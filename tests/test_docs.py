"""What README and docs show is what happens, and where they point there is something."""

from __future__ import annotations

import doctest
import re
import runpy
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import yaml
from pytorch_lightning.loggers import CSVLogger

import curvmon
from tests.helpers.lightning_smoke import module_of

ROOT = Path(__file__).parents[1]
README, DOCS = ROOT / "README.md", ROOT / "docs"
# by its path: some package in an environment may install a folder named docs
API = runpy.run_path(str(DOCS / "make_api.py"))
QUICK_START = DOCS / "quick-start.md"
PAGES = [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("examples/**/*.md")]


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`|<!--.*?-->", "", text, flags=re.DOTALL)


def anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.usefixtures("no_overhead_limit")
@pytest.mark.parametrize("path", [README, QUICK_START], ids=lambda path: path.name)
def test_code_runs(path: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {
        "Trainer": partial(
            pl.Trainer, max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ),
        "module": module_of(pl)(),
        "model": torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.GELU(), torch.nn.Linear(8, 3)),
        "batch": (torch.randn(16, 5), torch.randint(3, (16,))),
        "F": F,
    }  # fmt: skip
    for code in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        exec(code, names)
    assert isinstance(names["m"], curvmon.Measurement)
    assert names["s"].converged.all()
    if path == README:
        (monitor,) = (c for c in names["trainer"].callbacks if isinstance(c, curvmon.CurvatureMonitor))
        assert len(monitor.history) == 2


def test_the_quick_start_prints_its_table() -> None:
    code = re.search(r"```python\n([^`]*print\(m\)\n)```\n```\n(.*?)```", QUICK_START.read_text(), re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code.group(1), names)
    printed = [line.split() for line in str(names["m"]).splitlines()[3:] if not line.startswith("note")]
    shown = [line.split() for line in code.group(2).splitlines()[3:] if not line.startswith("note")]
    assert len(printed) == len(shown) == 6
    notes = [re.findall(r"^note: .*", text, re.MULTILINE) for text in (str(names["m"]), code.group(2))]
    assert notes[0] == notes[1]
    for ours, theirs in zip(printed, shown):
        assert ours[:2] == theirs[:2]
        # values may differ in the last digits between processors, by far less than their errors; shown rounded
        assert float(ours[2]) == pytest.approx(float(theirs[2]), rel=2e-2)


def test_figures_of_the_readme_are_those_of_the_tables() -> None:
    text, table = README.read_text(), (DOCS / "speed-table.md").read_text()
    memory_table = (DOCS / "memory-table.md").read_text()
    rows = [line for line in text.splitlines() if " passes" in line and line.startswith("|") and "× less" in line]
    assert len(rows) == 3
    for row in rows:
        passes, ratio = re.findall(r"([\d.]+) passes", row)[0], re.findall(r"(\d+) × less", row)[0]
        assert f"**{passes}**" in table and f"**{ratio}**" in table, row
        memory = re.findall(r"([\d.]+) × \|$", row)[0]
        assert memory in {f"{float(value):.1f}" for value in re.findall(r"MiB \| \*\*([\d.]+)\*\*", memory_table)}, row
    spectrum = (DOCS / "spectrum-table.md").read_text()
    found = re.search(
        r"take ([\d.]+) Hessian-vector products \(([\d.]+) with.*?eigsh\s+takes ([\d.]+), PyHessian ([\d.]+)",
        text,
        re.S,
    )
    assert found is not None
    names = ["curvmon, trace=False", "curvmon, trace=False, verified", "eigsh on curvlinops", "PyHessian"]
    for name, products in zip(names, found.groups()):
        (row, *_) = (line for line in spectrum.splitlines() if line.startswith(f"| {name} |"))
        assert row.split("|")[6].strip() == products


def test_examples_in_the_docs() -> None:
    for path in set(DOCS.glob("*.md")) - {API["PAGE"]}:  # those of the API are run where they stand
        assert doctest.testfile(str(path), module_relative=False).failed == 0, path.name


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text())):
        if not link.startswith(("http://", "https://")):
            target, _, anchor = link.partition("#")
            there = path.parent / target if target else path
            assert there.exists(), link
            assert not anchor or anchor in anchors(there), link


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text()
    assert [path.name for path in DOCS.glob("*.md") if path.name != "README.md" and f"({path.name})" not in index] == []


def test_the_api_reference_is_current() -> None:
    assert API["PAGE"].read_text() == API["page"](), "run `make docs`"


def test_the_api_reference_has_all_public_names() -> None:
    named = [name for names in API["SECTIONS"].values() for name in names]
    assert sorted([*named, "closed_form", "operators", "__version__"]) == sorted(curvmon.__all__)


def test_the_table_of_modules_is_current() -> None:
    assert API["MAP"].read_text() == API["architecture"](), "run `make docs`"


def test_the_table_of_modules_has_every_package() -> None:
    packages = {path.parent.name for path in (ROOT / "curvmon").glob("*/__init__.py")}
    assert packages == set(API["ORDER"])


def test_the_calls_of_a_measurement_are_as_listed(tmp_path: Path) -> None:
    rows = re.findall(r"^\| \d+ \| `(?:\w+\.)?(\w+)` \| `([\w/]+\.py)` \|", API["MAP"].read_text(), re.MULTILINE)
    expected = [(f"curvmon/{path}", function) for function, path in rows]
    calls: list[tuple[str, str]] = []

    class Logger(CSVLogger):
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            if any(key.startswith("curvmon_distance/") for key in metrics):
                calls.append(("logger", "log_metrics"))
            super().log_metrics(metrics, step)

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
        if event == "call" and path.startswith("curvmon/"):
            calls.append((path, frame.f_code.co_name))

    trainer = pl.Trainer(
        max_epochs=1, num_sanity_val_steps=0, accelerator="cpu", logger=Logger(tmp_path), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        # with a limit, the first measurement is planned by a forward pass before it
        callbacks=[curvmon.CurvatureMonitor(initial=False, max_overhead=None)],
    )  # fmt: skip
    sys.setprofile(trace)
    try:
        trainer.fit(module_of(pl)())
    finally:
        sys.setprofile(None)
    del calls[: calls.index(expected[0])]
    expected.append(("logger", "log_metrics"))
    assert 3 < len(expected) <= 20
    places = [calls.index(call) for call in expected]
    assert places == sorted(places)


def test_scripts_name_files_that_exist() -> None:
    scripts = [ROOT / "Makefile", *(path for path in (ROOT / ".ci").iterdir() if path.is_file())]
    names = [name for path in scripts for name in re.findall(r"\b((?:tests|docs)/[\w./-]*\w)", path.read_text())]
    assert len(names) > 5
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["title"], cited["version"]) == ("curvmon", curvmon.__version__)
    assert len(cited["references"]) == 2


def test_the_workflow_runs_what_is_run_here() -> None:
    path = ROOT / ".github/workflows/ci.yml"
    if not path.exists():
        pytest.skip("the sdist has no workflows")
    jobs = yaml.safe_load(path.read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands == [".ci/run", ".ci/release dist"]
    assert all((ROOT / command.split()[0]).exists() for command in commands)
