"""`python -m curvmon report PATH …` writes an HTML page; `python -m curvmon demo` trains a small network."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from curvmon.errors import InputError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m curvmon", description="Curvature between the layers of a network")
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="one HTML page for a run, or for several side by side")
    report.add_argument("paths", nargs="+", metavar="PATH", help="history.jsonl, the folder it is in, or a checkpoint")
    report.add_argument("--out", type=Path, default=Path("curvmon-report.html"), metavar="FILE.html")
    report.add_argument("--log-key-prefix", default="", help="of the monitor, where a run has several")
    # which has options and a help of its own, behind an import of Lightning
    commands.add_parser("demo", help="train a small network whose learning rate goes wrong", add_help=False)
    options, others = parser.parse_known_args(argv)
    try:
        if options.command == "demo":
            return _demo(others)
        if others:
            parser.error(f"unrecognized arguments: {' '.join(others)}")
        return _report(options.paths, options.out, options.log_key_prefix)
    except InputError as error:
        print(f"curvmon: {error}", file=sys.stderr)
        return 2


def _report(paths: Sequence[str], out: Path, prefix: str) -> int:
    from curvmon.monitor.saved_history import load_history
    from curvmon.reporting.report_page import report_page, write

    histories = [load_history(path, prefix) for path in paths]
    if len({history.name for history in histories}) < len(histories):
        histories = [replace(history, name=path) for history, path in zip(histories, paths)]
    write(report_page(histories), out)
    print(out)
    return 0


def _demo(argv: Sequence[str]) -> int:
    from curvmon.integrations.lightning.demo.run import main as demo

    demo(argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
