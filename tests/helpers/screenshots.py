"""Takes the pictures of TensorBoard and of the report that README and docs show: `make screenshots`."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from PIL import Image

from curvmon.monitor.saved_history import load_history
from curvmon.records import METRICS
from curvmon.reporting.dashboards import tensorboard_link
from curvmon.reporting.report_page import report_page
from curvmon.reporting.scalars import BY_DISTANCE, EIGENVALUES, heatmap_key
from tests.helpers.browser import Browser, tensorboard

WIDTH, HEIGHT = 1280, 900
"""of a first screen"""
PINNED = tensorboard_link("train_loss", "val_loss", address="").removeprefix("?").removesuffix("#timeseries")
HEATMAPS = quote(f"{heatmap_key('')}[{''.join(metric[0] for metric in METRICS)}]")
FIGURES = {"heatmap": heatmap_key("resonance"), "by_distance": BY_DISTANCE, "spectrum": EIGENVALUES}
"""pictures of the demo itself"""
# a jump that is smoothed away, or cut off as an outlier, looks like nothing
ALL_POINTS = """tagged('{kind}').filter(box => box.textContent.includes('Ignore outliers'))
    .forEach(box => (box.querySelector('input') ?? box).click())"""


class Page(NamedTuple):
    query: str
    tab: str
    ready: str
    """is true when everything is there"""
    act: tuple[str, ...]
    """what is then clicked"""
    height: int


PAGES = {
    "scalars": Page(
        f"smoothing=0&{PINNED}",
        "#timeseries",
        "text().split('Step Relative version_0').length > 4 && tagged('mat-checkbox').length > 3",
        (ALL_POINTS.format(kind="mat-checkbox"),),
        HEIGHT,
    ),
    "custom": Page(
        "",
        "#custom_scalars&_smoothingWeight=0",
        "text().includes('Matches (3)') && text().includes('Matches (2)')",
        (ALL_POINTS.format(kind="paper-checkbox"),),
        HEIGHT,
    ),
    "heatmaps": Page(
        "",
        f"#images&tagFilter={HEATMAPS}",
        "tagged('img').filter(image => image.naturalWidth > 300).length >= 4",
        ("tagged('tf-image-loader').forEach(loader => { loader._stepIndex = STEP; })",),
        1090,
    ),
    "alert": Page("", "#text", "text().includes('curvmon/alert')", (), 470),
}  # fmt: skip


def take(browser: Browser, address: str, page: Page, dark: bool, moment: int) -> Image.Image:
    """`moment`: how many pictures there are before that of the alert."""
    browser.call(
        "Emulation.setDeviceMetricsOverride", width=WIDTH, height=page.height, deviceScaleFactor=1, mobile=False
    )
    browser.open(f"{address}?darkMode={json.dumps(dark)}&{page.query}{page.tab}")
    browser.wait(page.ready)
    for action in page.act:
        browser.look(f"{action.replace('STEP', str(moment))} ?? true")
    picture = b""
    for _ in range(40):  # until nothing moves any more
        browser.look("new Promise(done => setTimeout(done, 700))")
        before, picture = picture, browser.screenshot()
        if picture == before:
            break
    return Image.open(io.BytesIO(picture)).convert("RGB")


def take_report(runs: list[Path], out: Path, dark: bool) -> None:
    """The first screen of the page of one run, or of several side by side."""
    histories = [replace(load_history(next(run.rglob("history.jsonl"))), name=run.name) for run in runs]
    with tempfile.TemporaryDirectory() as folder, Browser(WIDTH, HEIGHT) as browser:
        path = Path(folder, "report.html")
        path.write_text(report_page(histories), encoding="utf-8")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.call("Emulation.setEmulatedMedia", features=[scheme])
        browser.open(path.as_uri())
        browser.wait("document.querySelectorAll('#charts svg').length > 3")
        picture = Image.open(io.BytesIO(browser.screenshot())).convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(out, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Pictures of TensorBoard and of the report, with the logs of the demo")
    parser.add_argument("--demo", type=Path, default=Path("runs/demo"), help="what `make demo` has written")
    parser.add_argument("--healthy", type=Path, default=Path("runs/demo_healthy"), help="the same without the accident")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    take_report([options.demo], options.out / "report.png", dark=False)
    take_report([options.demo, options.healthy], options.out / "report_two_dark.png", dark=True)
    runs = sorted(options.demo.glob("csv/version_*"), key=lambda path: path.stat().st_mtime)
    moment = sorted(path.name for path in (runs[-1] / heatmap_key("resonance")).iterdir()).index("step_00000311.png")
    shutil.copy(options.demo / "demo.png", options.out / "demo.png")
    for name, key in FIGURES.items():
        steps = sorted((runs[-1] / key).iterdir())
        shutil.copy(steps[-1 if key == EIGENVALUES else moment], options.out / f"dashboard_{name}.png")
    with tensorboard(options.demo / "tensorboard") as address:
        for dark in (False, True):
            with Browser() as browser:  # a new one: it remembers settings
                for name in PAGES:
                    path = options.out / f"tensorboard_{name}{'_dark' if dark else ''}.png"
                    picture = take(browser, address, PAGES[name], dark, moment)
                    # 128 colours are enough for a page, and a third of the size
                    picture.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
                    print(f"{path}  {path.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
