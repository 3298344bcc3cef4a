"""The demo as a newcomer runs it, and what its logs look like in TensorBoard, in a real browser."""

from __future__ import annotations

import csv
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from curvmon.reporting.dashboards import tensorboard_link
from curvmon.reporting.scalars import heatmap_key
from tests.helpers.browser import Browser, chromium, tensorboard
from tests.helpers.time_limits import PATIENCE

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SPIKE_STEP = 311
"""the last one of the demo's epoch 12, the thirteenth of 24 steps each"""
METRICS = ("resonance", "coupling", "stable_rank", "gn_gap")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Its folder, with what it printed in printed.txt. Run once, also where pytest-xdist divides the tests."""
    own = tmp_path_factory.getbasetemp()
    out = (own if worker_id == "master" else own.parent) / "demo"
    out.mkdir(exist_ok=True)
    with (out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (out / "printed.txt").exists():
            hidden = ("WANDB_API_KEY", "WANDB_MODE", "WANDB_SILENT")
            environment = {name: value for name, value in os.environ.items() if name not in hidden}
            environment |= {"OMP_NUM_THREADS": "1", "HOME": str(out)}  # no key in a .netrc either
            command = [sys.executable, "-m", "curvmon", "demo", "--out", str(out)]
            done = subprocess.run(
                command, cwd=ROOT, env=environment, timeout=PATIENCE, text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout
            (out / "printed.txt").write_text(done.stdout)
    return out


def test_demo_raises_an_alert_soon_after_the_learning_rate_spike_and_one_at_the_validation(demo: Path) -> None:
    printed = (demo / "printed.txt").read_text()
    lines = printed.splitlines()
    pulse, validation = (i for i, line in enumerate(lines) if "ALERT" in line)
    at = int(lines[pulse].removeprefix("ALERT at step ").split(":")[0])
    assert SPIKE_STEP - 23 <= at < SPIKE_STEP and "Approaching instability: " in lines[pulse]
    assert lines[validation].startswith(f"ALERT at step {SPIKE_STEP}: ")
    assert lines[pulse - 1].startswith("   12 ") and lines[pulse - 1].endswith("<- learning rate x 100")
    assert "2 alerts. Where to look:" in lines
    assert len(lines) < 45 and max(map(len, lines)) < 200 and "warning" not in printed.lower()  # none but its own words


def measured(demo: Path) -> list[dict[str, str]]:
    (table,) = demo.glob("csv/*/metrics.csv")
    with table.open() as file:
        return [row for row in csv.DictReader(file) if row["curvmon/lambda_1"]]


def test_demo_writes_logs_and_pictures(demo: Path) -> None:
    rows = measured(demo)
    assert len(rows) == 17
    assert [row["curvmon/alerts"] for row in rows] == ["0.0"] * 13 + ["2.0"] * 4
    steps = {int(row["step"]) for row in rows}
    for metric in METRICS:
        pictures = {int(path.stem.removeprefix("step_")) for path in demo.glob(f"csv/*/{heatmap_key(metric)}/*.png")}
        assert {min(steps), SPIKE_STEP, max(steps)} <= pictures <= steps
    assert "2 alerts in steps" in (demo / "report.html").read_text(encoding="utf-8")
    assert len(list(demo.rglob("history.jsonl"))) == 1
    assert (demo / "demo.png").stat().st_size > 20_000
    if (demo / "wandb").exists():
        assert len(list(demo.glob("wandb/offline-run-*/run-*.wandb"))) == 1
    for word in ("demo.png", "curvmon_pictures", "metrics.csv", "tensorboard --logdir", "#custom_scalars"):
        assert word in (demo / "printed.txt").read_text()


# ---- in a browser ----


@pytest.fixture(scope="module")
def page(demo: Path) -> Iterator[tuple[Browser, str]]:
    if chromium() is None:
        pytest.skip("no Chromium (apt-get install chromium): the dashboards are not looked at")
    with tensorboard(demo / "tensorboard") as address, Browser() as browser:
        yield browser, address


def shows(page: tuple[Browser, str], tab: str, *expected: str) -> Browser:
    browser, address = page
    browser.open(f"{address}{tab}")
    for words in expected:
        browser.wait(f"text().includes({words!r})")
    return browser


def test_scalars(page: tuple[Browser, str], demo: Path) -> None:
    shows(page, "#scalars&tagFilter=curvmon%2F", "curvmon/lambda_1", "curvmon/lambda_min", "curvmon/stability_ratio")
    shows(page, "#scalars&tagFilter=distance%2Fresonance", "curvmon_distance/resonance/3")
    # lines are drawn on a canvas, but this tab has the last value in words
    last = float(measured(demo)[-1]["curvmon_distance/coupling/1"])
    shows(page, "?tagFilter=coupling%2F1%24#timeseries", "coupling", f"{last:.4g}")


def is_on_first_screen(browser: Browser, words: str) -> bool:
    """Without scrolling, and all of it."""
    place = f"""(() => {{
        const node = [...all(document)].filter(seen).find(node => words(node).trim() === {words!r});
        const box = node?.getBoundingClientRect();
        return box !== undefined && box.top >= 0 && box.bottom <= innerHeight;
    }})()"""
    return bool(browser.look(place))


def test_first_screen_of_the_custom_layout(page: tuple[Browser, str]) -> None:
    """The user's own charts, and the headline below them."""
    browser = shows(page, "#custom_scalars", "loss, accuracy, alerts", "Matches (3)", "Matches (2)")
    assert browser.look("[innerWidth, innerHeight]") == [1280, 900]
    for words in ("loss", "accuracy, alerts so far", "curvmon", "top eigenvalue λ₁", "stability ratio", "step ratio"):
        assert is_on_first_screen(browser, words), words
    for words in ("spectrum of the Hessian", "by distance between layers", "resonance by distance, log10"):
        browser.wait(f"text().includes({words!r})")
        assert not is_on_first_screen(browser, words), words


def test_every_chart_of_the_layout_has_lines(page: tuple[Browser, str]) -> None:
    browser = shows(page, "#custom_scalars", "GN-Gap by distance, log10", "top eigenvalues, log10")
    # a chart that is not on the screen is not loaded
    browser.call("Emulation.setDeviceMetricsOverride", width=1280, height=3200, deviceScaleFactor=1, mobile=False)
    try:
        browser.wait("text().includes('Matches (4)') && text().includes('Matches (5)')")
        browser.wait("!text().includes('Matches (0)')")  # what a chart says until it is loaded
    finally:
        browser.call("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)


def test_first_screen_with_pinned_charts(page: tuple[Browser, str]) -> None:
    """Time Series sorts groups by name: without pins, the user's charts are below all of curvmon's."""
    link = tensorboard_link("train_loss", "val_loss", address="")
    browser = shows(page, link, "Pinned", "2 cards", "curvmon_distance")
    for words in ("train_loss", "val_loss", "curvmon"):
        assert is_on_first_screen(browser, words), words


def test_heatmaps(page: tuple[Browser, str]) -> None:
    browser = shows(page, "#images", *map(heatmap_key, METRICS))
    browser.wait("tagged('img').filter(image => image.naturalWidth > 300).length >= 5")
    widths = browser.look("tagged('img').map(image => image.naturalWidth)")
    assert max(widths) <= 700  # wider ones are shrunk until their text cannot be read


def test_alert_text(page: tuple[Browser, str], demo: Path) -> None:
    words = (demo / "printed.txt").read_text().split("ALERT")[1].split(": ", 1)[1].split()[:6]
    shows(page, "#text", "curvmon/alert", f"step {SPIKE_STEP}", " ".join(words))


def test_dark_mode(page: tuple[Browser, str]) -> None:
    browser = shows(page, "?darkMode=true#images", "curvmon_pictures/coupling")
    browser.wait("document.body.classList.contains('dark-mode')")
    browser.wait("tagged('img').filter(image => image.naturalWidth > 300).length >= 5")
    # read back from the page: an opaque white corner, whatever is behind the picture
    corner = """(() => {
        const canvas = document.createElement('canvas'), image = tagged('img')[0];
        canvas.width = image.naturalWidth; canvas.height = image.naturalHeight;
        const context = canvas.getContext('2d');
        context.drawImage(image, 0, 0);
        return [...context.getImageData(0, 0, 1, 1).data];
    })()"""
    assert browser.look(corner) == [255, 255, 255, 255]
