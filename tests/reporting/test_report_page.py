"""The HTML report: what it says without a script, what a browser makes of it, and the command that writes it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from curvmon.__main__ import main
from curvmon.errors import InputError
from curvmon.monitor.history_file import HistoryFile
from curvmon.records import Alert, RunHistory, Snapshot
from curvmon.records.formatting import short
from curvmon.reporting.report_data import MOST_FRAMES, MOST_POINTS, report_data, thinned_curve
from curvmon.reporting.report_page import report_page
from curvmon.reporting.tables import headline_rows
from tests.helpers.browser import Browser, chromium
from tests.helpers.synthetic_records import synthetic_measurement
from tests.helpers.synthetic_runs import synthetic_run

HOSTILE = '</script><b onload="x">&'
LONG = [f"model.encoder.layers.{i}.self_attention.out_proj" for i in range(9)]


def alert_at(step: int, where: str = "layer2--layer3") -> Alert:
    return replace(synthetic_run(alerts=[step]).raised[0], where=where)


def odd_run() -> RunHistory:
    """NaN, infinity and zeros, names that look like HTML, other nodes halfway, and a metric that is never defined."""
    flat = synthetic_measurement(3, [HOSTILE, "b", "c"])
    gap = flat.gn_gap.clone()
    gap[0, 1], gap[1, 2], gap[2, 2] = math.nan, math.inf, 0.0
    odd = replace(flat, gn_gap=gap, stable_rank=flat.stable_rank * math.nan, notes=(HOSTILE,))
    snapshots = (Snapshot(0, 0, odd), Snapshot(10, 0, synthetic_measurement(12)), Snapshot(20, 1))
    return RunHistory(snapshots, (), (alert_at(10, f"{HOSTILE}--b"), alert_at(15)), HOSTILE)


RUNS: dict[str, list[RunHistory]] = {
    "one": [synthetic_run(24, "lightning_logs/version_0", alerts=[1200, 1500], nodes=6)],
    "two": [
        synthetic_run(24, "lightning_logs/version_0", alerts=[1200, 1500], nodes=6),
        synthetic_run(18, "lightning_logs/version_1", rise=1.05, nodes=6),
    ],
    "three": [synthetic_run(name="same") for _ in range(3)],
    "odd": [odd_run()],
    "many layers": [replace(synthetic_run(3), snapshots=(Snapshot(0, 0, synthetic_measurement(24)),))],
    "long names": [replace(synthetic_run(3), snapshots=(Snapshot(0, 0, synthetic_measurement(9, LONG)),))],
    "pulses alone": [RunHistory(pulses=synthetic_run().pulses)],
    "spectra alone": [RunHistory(tuple(replace(s, measurement=None) for s in synthetic_run().snapshots))],
    "one layer": [RunHistory((Snapshot(5, 0, synthetic_measurement(1)),))],
    "nothing": [RunHistory(), synthetic_run(2)],
}


def without_script(page: str) -> str:
    return re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)


# ---- without a browser ----


@pytest.mark.parametrize("name", RUNS)
def test_loads_nothing(name: str) -> None:
    page = report_page(RUNS[name])
    assert re.findall(r"https?://[^\s\"'<]+", page) == ["http://www.w3.org/2000/svg"]  # a name, not an address
    assert re.findall(r"\b(?:src|href|import|@import|url)\s*[=(]", page) == []
    assert len(page) < 400_000


def test_the_verdict_comes_first_and_needs_no_script() -> None:
    text = without_script(report_page(RUNS["two"]))
    alert = RUNS["two"][0].alerts[0]
    assert text.index("2 alerts in steps 0 to 2390. The first, at step 1200 (epoch 12)") < text.index("Curves")
    assert alert.headline in text and alert.evidence[0].replace(">", "&gt;") in text and alert.suggestion in text
    assert "No alerts in 18 validations, steps 0 to 1790." in text
    assert short(RUNS["two"][0].spectra[-1].sharpness) in text


def test_text_of_users_is_no_html() -> None:
    page = report_page(RUNS["odd"])
    assert HOSTILE not in page and "<b onload" not in page
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page, re.DOTALL)[0])
    assert data["runs"][0]["frames"][0]["nodes"][0] == HOSTILE
    gaps = data["runs"][0]["frames"][0]["values"]["gn_gap"]
    assert gaps[1] is None and gaps[4] == "∞"


def test_a_report_needs_a_run() -> None:
    with pytest.raises(InputError, match="at least one run"):
        report_page([])


def test_thinning_keeps_spikes() -> None:
    points = [(i, 1.0 + 1e-3 * (i % 7)) for i in range(10_000)]
    points[4321], points[8000] = (4321, 50.0), (8000, -3.0)
    kept = thinned_curve(points, 200)
    assert len(kept) <= 200 and kept == sorted(kept)
    assert (4321, 50.0) in kept and (8000, -3.0) in kept
    assert thinned_curve(points[:200], 200) == points[:200]


def test_a_long_run_fits_into_a_page() -> None:
    measurement = synthetic_measurement(8)
    snapshots = tuple(Snapshot(i, i, measurement) for i in range(3000))
    pulses = tuple(replace(synthetic_run(1).pulses[0], step=i) for i in range(30_000))
    history = RunHistory(snapshots, pulses, (alert_at(1007), alert_at(99_999)))
    (run,) = report_data([history], [headline_rows(history)])["runs"]
    assert len(run["curves"]["curvmon/step_ratio"]) <= MOST_POINTS
    steps = [frame["step"] for frame in run["frames"]]
    assert len(steps) <= MOST_FRAMES + 2 and 1007 in steps and steps[-1] == 2999
    assert len(report_page([history])) < 1_500_000


# ---- the command ----


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i, run in enumerate(RUNS["two"]):
        HistoryFile().write(tmp_path / "logs" / f"version_{i}", [*run.snapshots, *run.pulses, *run.raised])
    out = tmp_path / "new" / "page.html"
    paths = [str(tmp_path / "logs" / "version_0"), str(tmp_path / "logs" / "version_1" / "history.jsonl")]
    assert main(["report", *paths, "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    text = without_script(out.read_text(encoding="utf-8"))
    assert "logs/version_0" in text and "logs/version_1" in text and "2 alerts in" in text


def test_runs_of_the_same_name_are_called_by_their_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for parent in ("a", "b"):
        HistoryFile().write(tmp_path / parent / "logs" / "version_0", synthetic_run(3).snapshots)
    main(["report", "a/logs/version_0", "b/logs/version_0"])
    text = without_script(Path("curvmon-report.html").read_text(encoding="utf-8"))
    assert "<h3>a/logs/version_0</h3>" in text and "<h3>b/logs/version_0</h3>" in text


def test_command_where_there_is_no_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert re.match(r"curvmon: there is no .*history\.jsonl\n$", capsys.readouterr().err)


def test_command_with_unknown_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["report", "a", "--colour", "red"])
    assert "unrecognized arguments: --colour red" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["demo", "--help"])
    assert "--spike" in capsys.readouterr().out


def test_demo_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["demo"]) == 2
    assert "needs more packages: pip install scikit-learn matplotlib tensorboard" in capsys.readouterr().err


def test_a_history_writes_its_page(tmp_path: Path) -> None:
    run = synthetic_run()
    page = run.report(tmp_path / "a" / "b.html")
    assert (tmp_path / "a" / "b.html").read_text(encoding="utf-8") == page == report_page([run])


# ---- in a browser ----


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("report")
    paths = {name: folder / f"{name.replace(' ', '_')}.html" for name in RUNS}
    for name, path in paths.items():
        path.write_text(report_page(RUNS[name]), encoding="utf-8")
    return paths


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    if chromium() is None:
        pytest.skip("no Chromium (apt-get install chromium): the report is not looked at")
    with Browser() as browser:
        yield browser


def opened(window: Browser, path: Path, width: int = 1280, scheme: str = "light", media: str = "screen") -> Browser:
    window.errors.clear()
    window.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    window.call("Emulation.setEmulatedMedia", media=media, features=features)
    window.open(path.as_uri())
    window.wait("document.readyState === 'complete'")
    return window


CLIPPED = """[...document.querySelectorAll('body *')].filter(node => {
    const box = node.getBoundingClientRect();
    if (!box.width || node.closest('title, script, datalist, select')) return false;
    if (node.localName === 'text') {
        const frame = node.ownerSVGElement.getBoundingClientRect();
        return box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1
            || box.bottom > frame.bottom + 1;
    }
    const scrolls = node.clientWidth > 0 && node.scrollWidth > node.clientWidth + 1;
    const isBlock = !node.closest('svg') && getComputedStyle(node).display !== 'inline';
    return box.right > innerWidth + 1 || box.left < -1 || (isBlock && scrolls);
}).map(node => `${node.localName}.${node.className.baseVal ?? node.className}: ${node.textContent.slice(0, 40)}`)"""
OVERLAPPING = """[...document.querySelectorAll('svg')].flatMap(svg => {
    const texts = [...svg.querySelectorAll('text:not([transform]):not(.alert)')];
    const boxes = texts.map(node => node.getBoundingClientRect());
    return boxes.flatMap((a, i) => boxes.slice(i + 1).filter(b =>
        a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3));
}).length"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 420])
@pytest.mark.parametrize("name", RUNS)
def test_no_errors_and_nothing_clipped(
    window: Browser, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    browser = opened(window, pages[name], width, scheme)
    assert browser.look("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
    tables = name in ("two", "three", "odd") and width == 420  # wide tables are scrolled
    clipped = [text for text in browser.look(CLIPPED) if not (tables and re.match(r"div\.table|t\w+\.:", text))]
    assert clipped == []
    assert browser.look(OVERLAPPING) == 0
    assert browser.errors == []


def test_the_slider_moves_the_heatmap(window: Browser, pages: dict[str, Path]) -> None:
    browser = opened(window, pages["one"])
    (run,) = RUNS["one"]
    measured = [snapshot for snapshot in run.snapshots if snapshot.measurement is not None]
    cells = "[...document.querySelectorAll('#heatmaps rect title')].map(node => node.textContent)"
    colours = "[...document.querySelectorAll('#heatmaps rect')].map(node => node.getAttribute('fill')).join()"
    assert browser.look("document.getElementById('step').textContent") == "step 1200"  # that of the first alert
    seen = set()
    for i in (0, 7, len(measured) - 1):
        browser.look(f"(slider.value = {i}, slider.dispatchEvent(new Event('input')))")
        assert browser.look("document.querySelector('#heatmaps h4').textContent").endswith(f"step {measured[i].step}")
        assert browser.look("document.getElementById('step').textContent") == f"step {measured[i].step}"
        measurement = measured[i].measurement
        assert measurement is not None
        shown = [float(text.rsplit(": ")[1]) for text in browser.look(cells)]
        torch.testing.assert_close(
            torch.tensor(shown).reshape(6, 6), measurement.resonance.float(), rtol=2e-3, atol=0.0, check_dtype=False
        )
        seen.add(browser.look(colours))
    assert len(seen) == 3
    browser.look("(metric.value = 'coupling', metric.dispatchEvent(new Event('change')))")
    assert browser.look("document.querySelector('#heatmaps h4').textContent").startswith("coupling")
    assert browser.errors == []


def test_the_step_of_an_alert(window: Browser, pages: dict[str, Path]) -> None:
    """A button leads there; the pair that it names is framed, and the headline is below."""
    browser = opened(window, pages["one"])
    browser.look("[...document.querySelectorAll('#jumps button')].at(-1).click()")
    assert browser.look("document.getElementById('step').textContent") == "step 1500"
    assert browser.look("document.querySelectorAll('#heatmaps rect.framed:not(.inner)').length") == 2
    assert RUNS["one"][0].alerts[0].headline in browser.look("document.getElementById('heatmaps').textContent")
    browser.look("(slider.value = 0, slider.dispatchEvent(new Event('input')))")
    assert browser.look("document.querySelectorAll('#heatmaps rect.framed').length") == 0
    marks = "[...document.querySelectorAll('#charts svg')].map(svg => svg.querySelectorAll('line.alert').length)"
    assert set(browser.look(marks)) == {2}


def test_runs_next_to_each_other_have_the_same_axes(window: Browser, pages: dict[str, Path]) -> None:
    browser = opened(window, pages["two"])
    ticks = """[...document.querySelectorAll('#charts .chart')].map(group =>
        [...group.querySelectorAll('svg')].map(svg => [...svg.querySelectorAll('text:not(.alert)')].map(
            node => [node.textContent, node.getAttribute('y')].join())))"""
    charts: list[list[Any]] = browser.look(ticks)
    assert len(charts) > 8
    assert all(len(pair) == 2 and pair[0] == pair[1] and len(pair[0]) > 3 for pair in charts)
    tops = """[...document.querySelectorAll('#charts .runs')].map(
        row => [...row.children].map(box => box.getBoundingClientRect().top))"""
    assert all(first == second for first, second in browser.look(tops))
    widths = "[...document.querySelectorAll('#charts svg')].map(svg => svg.clientWidth)"
    assert len(set(browser.look(widths))) == 1


def test_pointing_at_a_curve_reads_its_numbers(window: Browser, pages: dict[str, Path]) -> None:
    browser = opened(window, pages["one"])
    middle = "(box => [box.left + box.width / 2, box.top + 60])"
    place = browser.look(f"{middle}(document.querySelector('#charts svg').getBoundingClientRect())")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
    browser.wait(r"/^step \d+:  ?[\d.]+$/.test(document.querySelector('#charts .readout').textContent)")


def test_a_window_that_becomes_narrower(window: Browser, pages: dict[str, Path]) -> None:
    browser = opened(window, pages["one"])
    browser.call("Emulation.setDeviceMetricsOverride", width=420, height=900, deviceScaleFactor=1, mobile=False)
    browser.wait("document.querySelector('#charts svg').viewBox.baseVal.width < 400")
    assert browser.look(CLIPPED) == [] and browser.errors == []


def test_in_print_a_dark_page_is_white(window: Browser, pages: dict[str, Path]) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    dark = opened(window, pages["one"], scheme="dark").look(colour)
    browser = opened(window, pages["one"], scheme="dark", media="print")
    assert dark != browser.look(colour) == "rgb(255, 255, 255)"
    assert browser.look("getComputedStyle(slider.parentElement).display") == "none"
    browser.call("Emulation.setEmulatedMedia", media="", features=[])
