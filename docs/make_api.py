"""Writes what the docs say of the code: `make docs`. A test checks that all of it is current.

docs/api.md from the docstrings of the public names; the table of modules in docs/architecture.md from the first line
of each docstring; the table of metrics in README.md from the metric registry.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import curvmon
from curvmon.integrations.transformers import CurvatureCallback
from curvmon.metrics.mean_curvature import MeanCurvature
from curvmon.metrics.pair_summaries import mean_over_pairs
from curvmon.metrics.registry import (
    AlertSpec,
    MetricSpec,
    PairMetric,
    ScalarMetric,
    markdown_table,
    register,
    unregister,
)
from curvmon.recorder.monitored_run import MonitoredRun
from curvmon.reporting.dashboards import tensorboard_link, wandb_workspace

PAGE = Path(__file__).with_name("api.md")
MAP = Path(__file__).with_name("architecture.md")
README = Path(__file__).parents[1] / "README.md"
PACKAGE = Path(curvmon.__file__).parent
SECTIONS: dict[str, list[str]] = {
    "Functions": ["measure", "exact", "spectrum", "stability_limit", "pulse", "load_history"],
    "The monitor": ["CurvatureMonitor", "Monitor", "AlertRules", "ChangeDetector", "Sensitivity"],
    "Records": [
        "Measurement",
        "ExactMeasurement",
        "Pair",
        "Spectrum",
        "GroupSpectrum",
        "Density",
        "StabilityLimit",
        "Pulse",
        "PulseRecord",
        "RunHistory",
        "AttentionSigns",
        "Alert",
    ],
    "Errors": [
        "CurvmonError",
        "InputError",
        "NodeError",
        "LossError",
        "DivergedError",
        "DifferencesError",
        "NonFiniteError",
        "DoubleBackwardError",
    ],
}
"""every name in `curvmon.__all__` apart from the modules `closed_form` and `operators`, and the version"""
FURTHER = {
    "curvmon.metrics.mean_curvature.MeanCurvature": MeanCurvature,
    "curvmon.metrics.registry.register": register,
    "curvmon.metrics.registry.unregister": unregister,
    "curvmon.metrics.registry.MetricSpec": MetricSpec,
    "curvmon.metrics.registry.PairMetric": PairMetric,
    "curvmon.metrics.registry.ScalarMetric": ScalarMetric,
    "curvmon.metrics.registry.AlertSpec": AlertSpec,
    "curvmon.metrics.pair_summaries.mean_over_pairs": mean_over_pairs,
    "curvmon.integrations.transformers.CurvatureCallback": CurvatureCallback,
    "curvmon.reporting.dashboards.tensorboard_link": tensorboard_link,
    "curvmon.reporting.dashboards.wandb_workspace": wandb_workspace,
}
ORDER = [
    "records",
    "isolation",
    "graph",
    "operators",
    "pairs",
    "spectrum",
    "metrics",
    "alerts",
    "monitor",
    "reporting",
    "recorder",
    "integrations",
]
_HOOK = re.compile(r"(on_|setup|state_dict|load_state_dict|state_key)")


def page() -> str:
    parts = [
        "# API reference\n\nMade from the docstrings by `make docs`; examples in them are run by the tests. "
        "Import everything from `curvmon`, unless it says otherwise.\n"
    ]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        made = title not in ("Records", "Errors")
        parts += [_entry(name, getattr(curvmon, name), made_by_user=made) for name in names]
    parts.append(f"## curvmon.closed_form\n\n{_text(curvmon.closed_form)}\n")
    parts += [_entry(name, item, made_by_user=not inspect.isclass(item)) for name, item in _own(curvmon.closed_form)]
    parts.append(f"## curvmon.operators\n\n{_text(curvmon.operators)}\n")
    for name in ("hessian", "gauss_newton", "between_nodes", "NodeOperators", "LinearOperator"):
        item = getattr(curvmon.operators, name)
        parts.append(_entry(name, item, made_by_user=not inspect.isclass(item)))
    parts.append("## Elsewhere\n")
    parts += [_entry(item.__name__, item, origin=item.__module__) for item in FURTHER.values()]
    return "\n".join(parts)


def architecture() -> str:
    """The page with the table of modules between its markers renewed."""
    return between("modules", _module_tables(), MAP.read_text())


def readme() -> str:
    """The README with the table of metrics between its markers renewed."""
    return between("metrics", markdown_table(), README.read_text())


def between(marker: str, content: str, page: str) -> str:
    """`page` with `content` between `<!-- marker -->` and `<!-- /marker -->`."""
    start, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    before, _, rest = page.partition(start)
    return f"{before}{start}\n{content}\n{end}{rest.partition(end)[2]}"


def _module_tables() -> str:
    """A row for every module, in the order in which packages may import each other."""
    parts = []
    for folder in ["", *ORDER]:
        paths = (
            sorted((PACKAGE / folder).glob("*.py"))
            if folder != "integrations"
            else sorted((PACKAGE / folder).rglob("*.py"))
        )
        rows = [(path.relative_to(PACKAGE).as_posix(), _first_line(path)) for path in paths]
        title = f"{folder}/: {_first_line(PACKAGE / folder / '__init__.py')}" if folder else "curvmon/"
        table = "\n".join(
            f"| `{name}` | {text} |" for name, text in rows if text and (not folder or "__init__" not in name)
        )
        parts.append(f"### {title}\n\n| module | what it does |\n|---|---|\n{table}")
    return "\n\n".join(parts)


def _first_line(path: Path) -> str:
    """Of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0].removesuffix(".").replace("|", "\\|")


def _entry(name: str, item: Any, origin: str = "", made_by_user: bool = True) -> str:
    lines = [f"### {name}\n"]
    if origin:
        lines.append(f"`from {origin} import {name}`\n")
    if made_by_user:
        lines.append(f"```text\n{_signature(name, item)}\n```\n")
    lines.append(f"{_text(item)}\n")
    if inspect.isclass(item):
        lines += _members(item)
    return "\n".join(lines)


def _signature(name: str, item: Any) -> str:
    """One argument a line where they do not fit in one."""
    found = inspect.signature(item)
    kinds = [p.kind for p in found.parameters.values()]
    arguments = [_argument(p) for p in found.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        arguments.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    nothing = inspect.isclass(item) or found.return_annotation is inspect.Signature.empty
    ending = "" if nothing else f" -> {_type(found.return_annotation)}"
    brief = f"{name}({', '.join(arguments)}){ending}"
    return brief if len(brief) <= 100 else f"{name}(\n    " + ",\n    ".join(arguments) + f",\n){ending}"


def _argument(p: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(p.kind, "")
    default = "" if p.default is inspect.Parameter.empty else f" = {p.default!r}"
    return f"{stars}{p.name}: {_type(p.annotation)}{default}"


def _type(annotation: Any) -> str:
    """Strings under `from __future__ import annotations`, and they are the better text: names as in the source."""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _text(item: Any) -> str:
    """A docstring in Markdown: examples become code blocks, arguments a list; attributes are in the table of fields."""
    found, code, section = [], False, ""
    for line in (inspect.getdoc(item) or "").splitlines():
        if line == "Attributes:" or (section == "Attributes:" and (line.startswith("    ") or not line)):
            section = "Attributes:"
        elif re.fullmatch(r"(Args|Example|Raises|Returns):", line):
            code = _close(found, code)
            section = line
            found += ["", f"**{line.removesuffix(':')}**", ""]
        elif section in ("Args:", "Attributes:", "Raises:") and line.strip():
            argument = re.match(r"    ([\w, ]+): (.*)", line)
            found.append(f"- `{argument[1]}`: {argument[2]}" if argument else f"  {line.strip()}")
        elif line.startswith("    "):
            if not code:
                found += ["```text" if ">>>" not in line else "```python"]
            code = True
            found.append(line[4:])
        else:
            code = _close(found, code)
            found.append(line)
    _close(found, code)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(found)).strip()


def _close(found: list[str], code: bool) -> bool:
    if code:
        found.append("```")
    return False


def _members(item: type) -> Iterator[str]:
    """Fields with the string below them, then properties and methods with the first paragraph of theirs."""
    rows = [f"| `{field}` | {text} |" for field, text in _fields(item).items()]
    own = (base for base in reversed(item.__mro__) if base is item or base is MonitoredRun)
    for name, member in sorted({name: member for base in own for name, member in vars(base).items()}.items()):
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if name.startswith("_") or _HOOK.match(name) or not inspect.isfunction(function):
            continue
        text = inspect.cleandoc(function.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        if text:
            rows.append(f"| `{name}` | {text} |" if isinstance(member, property) else f"| `{name}()` | {text} |")
    if rows:
        yield "| | |\n|---|---|\n" + "\n".join(rows) + "\n"


def _fields(item: type) -> dict[str, str]:
    """Own fields of a record with their types, and what the docstring or the string below them says."""
    if not dataclasses.is_dataclass(item):
        return {}
    found: dict[str, str] = {}
    attributes = _attributes(inspect.getdoc(item) or "")
    (body,) = (node for node in ast.parse(inspect.getsource(item)).body if isinstance(node, ast.ClassDef))
    for node, following in zip(body.body, [*body.body[1:], ast.Pass()]):
        if isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_"):
            text = attributes.get(ast.unparse(node.target), "")
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                text = re.sub(r"\s+", " ", str(following.value.value))
            found[f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}".replace("|", "\\|")] = text.replace(
                "|", "\\|"
            )
    return found


def _attributes(docstring: str) -> dict[str, str]:
    """The section "Attributes" of a docstring, by name."""
    section = re.search(r"^Attributes:\n((?:    .*\n?|\n)*)", docstring, re.MULTILINE)
    entries = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", section[1] if section else "", re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for name, text in entries}


def _own(module: Any) -> list[tuple[str, Any]]:
    """Public functions and classes of a module, in the order of its source."""
    found = [
        (name, item)
        for name, item in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(item) or inspect.isclass(item))
        and item.__module__ == module.__name__
    ]
    return sorted(found, key=lambda pair: inspect.getsourcelines(pair[1])[1])


if __name__ == "__main__":
    PAGE.write_text(page())
    MAP.write_text(architecture())
    README.write_text(readme())
