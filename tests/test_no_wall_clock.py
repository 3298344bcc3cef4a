"""No result of a test depends on the clock on the wall: on a busy machine tests take longer, and pass."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCES = sorted(TESTS.rglob("*.py"))
CLOCKS = {"time", "perf_counter", "monotonic", "process_time", "thread_time", "sleep"}
ALLOWED = {
    ("helpers/browser.py", "monotonic"): "a page or a server that is not ready within PATIENCE is an error",
    ("helpers/browser.py", "sleep"): "polls a page and the output of a server",
    ("helpers/ddp_run.py", "perf_counter"): "prints how long a scenario took; no test reads it",
    ("helpers/logger_readers.py", "monotonic"): "a file that is not complete within PATIENCE is an error",
    ("helpers/logger_readers.py", "sleep"): "polls a file that another process writes",
    ("integrations/lightning/test_ddp.py", "monotonic"): "no progress within PATIENCE is a deadlock",
    ("integrations/lightning/test_ddp.py", "sleep"): "polls the files that other processes write",
    ("monitor/test_history_file.py", "sleep"): "yields until the file of another process has grown",
}
"""(file, what it uses): why no result depends on it"""


def uses(code: str) -> Iterator[tuple[int, str]]:
    """(line, name) of every clock that is read, and of every deadline that is a number instead of PATIENCE."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time":
            if node.attr.removesuffix("_ns") in CLOCKS:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call):
            deadlines = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
            name = node.func.attr if isinstance(node.func, ast.Attribute) else "timeout"
            if name in ("wait", "join", "acquire"):
                deadlines += node.args
            if any(isinstance(value, ast.Constant) and type(value.value) in (int, float) for value in deadlines):
                yield node.lineno, name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(TESTS)))
def test_no_clock_is_read(path: Path) -> None:
    file = path.relative_to(TESTS).as_posix()
    assert [f"line {line}: {name}" for line, name in uses(path.read_text()) if (file, name) not in ALLOWED] == []


def test_every_exception_is_needed() -> None:
    used = {(path.relative_to(TESTS).as_posix(), name) for path in SOURCES for _, name in uses(path.read_text())}
    assert ALLOWED.keys() - used == set()


def test_clocks_and_deadlines_are_seen() -> None:
    seen = """
        from time import sleep
        time.time(); time.perf_counter_ns(); clock = time.monotonic
        event.wait(10); thread.join(60.0); lock.acquire(timeout=5); run(command, timeout=240)
    """
    unseen = """
        ", ".join(["1"]); event.wait(PATIENCE); run(command, timeout=PATIENCE); timeout = 3; self.perf_counter()
        time = 1; recorder.time
    """
    assert len(list(uses("if True:" + seen))) == 8
    assert not list(uses("if True:" + unseen))
