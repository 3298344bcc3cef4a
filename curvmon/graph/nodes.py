"""Which modules to measure: resolve names and glob patterns, or choose a handful of blocks in execution order."""

from __future__ import annotations

import difflib
import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from curvmon.errors import NodeError
from curvmon.graph.pytree import first_floating

MIN_NODES, MAX_NODES = 5, 8
ROOT = "root"
"""label of the model itself, whose name in torch is empty"""


class Node(NamedTuple):
    """One call of one module. A module that is called several times is several nodes."""

    label: str
    module: nn.Module
    call: int


class Call(NamedTuple):
    """The `call`-th call of the module `name` returned a tensor of this shape (None: no floating tensor)."""

    name: str
    module: nn.Module
    call: int
    shape: torch.Size | None
    returned: str

    @property
    def key(self) -> tuple[int, int]:
        """By identity: the hash of a torchmetrics module changes with its state."""
        return id(self.module), self.call


def record_calls(model: nn.Module, run: Callable[[], Any]) -> list[Call]:
    """Run once and list the calls of all submodules, in the order in which they returned."""
    calls: list[Call] = []
    counts: Counter[int] = Counter()
    names = {id(module): clean_name(name) for name, module in model.named_modules()}

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        tensor = first_floating(output)
        shape = None if tensor is None else tensor.shape
        calls.append(Call(names[id(module)], module, counts[id(module)], shape, type(output).__name__))
        counts[id(module)] += 1

    # scripted modules take no hooks
    hookable = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    handles = [module.register_forward_hook(hook) for module in hookable]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def clean_name(name: str) -> str:
    """A name without the `_orig_mod` that torch.compile inserts."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def resolve(model: nn.Module, calls: list[Call], wanted: Sequence[str], what: str = "node") -> list[Call]:
    """The calls that match names or patterns, in execution order.

    `layer*` matches within one level ("layer1", not "layer1.0"), `**` any number of levels. A name may end in
    `.call2` to select only the second call of a module.
    """
    named = {clean_name(name): module for name, module in model.named_modules(remove_duplicate=False)}
    modules = {f"{ROOT}_": model, ROOT: model, **named}
    chosen: set[tuple[int, int]] = set()
    for pattern in wanted:
        clean = clean_name(pattern)
        base, call = _split_call(clean, modules)
        if base in modules:
            chosen.update(_named(calls, base, modules[base], call, what))
        elif any(c in pattern for c in "*?["):
            matched = {id(module) for name, module in named.items() if matches(name, clean)}
            usable = {c.key for c in calls if id(c.module) in matched and c.shape is not None}
            if not usable:
                reason = "no module" if not matched else "no module that is called and returns a floating tensor"
                raise NodeError(f"{what} pattern {pattern!r} matches {reason}. Modules: {_listed(list(named))}")
            chosen.update(usable)
        else:
            raise _unknown(pattern, clean, named)
    return [call for call in calls if call.key in chosen]


def _split_call(name: str, modules: dict[str, nn.Module]) -> tuple[str, int | None]:
    base, _, last = name.rpartition(".")
    if name not in modules and base in modules and last.startswith("call") and last[4:].isdigit():
        return base, int(last[4:]) - 1
    return name, None


def _named(calls: list[Call], name: str, module: nn.Module, call: int | None, what: str) -> list[tuple[int, int]]:
    ran = [c for c in calls if c.module is module and (call is None or c.call == call)]
    if not ran:
        when = "is never called in this loss" if call is None else f"has no call {call + 1} in this loss"
        raise NodeError(f"{what} {name!r} {when}; choose a module whose forward runs. These ran: {_ran(calls)}")
    for c in ran:
        if c.shape is None:
            raise NodeError(
                f"{what} {name!r} returned {c.returned}, not a floating tensor; "
                f"choose a module that returns activations"
            )
    return [c.key for c in ran]


def matches(name: str, pattern: str) -> bool:
    """`layer*` matches within one level, `**` any number of levels."""

    def match(parts: list[str], patterns: list[str]) -> bool:
        if not patterns:
            return not parts
        if patterns[0] == "**":
            return any(match(parts[i:], patterns[1:]) for i in range(len(parts) + 1))
        return bool(parts) and fnmatch.fnmatchcase(parts[0], patterns[0]) and match(parts[1:], patterns[1:])

    return bool(name) and match(name.split("."), pattern.split("."))


def _ran(calls: list[Call]) -> str:
    return _listed([c.name for c in calls if c.shape is not None])


def _listed(names: list[str], most: int = 12) -> str:
    names = [name for name in dict.fromkeys(names) if name]
    return ", ".join(names[:most]) + (f", … ({len(names)} in all)" if len(names) > most else "")


def check_names(model: nn.Module, wanted: Sequence[str]) -> None:
    """Raise `NodeError` for names and patterns that match no module, without running the model."""
    named = {clean_name(name): module for name, module in model.named_modules(remove_duplicate=False)}
    modules = {f"{ROOT}_": model, ROOT: model, **named}
    for pattern in wanted:
        clean = clean_name(pattern)
        if _split_call(clean, modules)[0] in modules:
            continue
        if not any(c in pattern for c in "*?["):
            raise _unknown(pattern, clean, named)
        if not any(matches(name, clean) for name in named):
            raise NodeError(f"node pattern {pattern!r} matches no module. Modules: {_listed(list(named))}")


def _unknown(pattern: str, clean: str, named: dict[str, nn.Module]) -> NodeError:
    hint = name_hint(clean, named, f"modules: {_listed(list(named))}")
    return NodeError(f"the model has no module {pattern!r}; {hint}")


def name_hint(name: str, names: Iterable[str], otherwise: str) -> str:
    """The names that are close to a wrong one, for an error message; `otherwise` if there are none."""
    near = difflib.get_close_matches(name, list(names), n=5, cutoff=0.4)
    return f"did you mean {', '.join(map(repr, near))}?" if near else otherwise


def labelled(calls: list[Call], chosen: list[Call]) -> list[Node]:
    """Nodes with unique labels: the module's name, with `.call1`, `.call2`, … where it is called several times."""
    total = Counter(id(call.module) for call in calls)
    root = ROOT if all(call.name != ROOT for call in calls) else f"{ROOT}_"
    return [
        Node((c.name or root) + (f".call{c.call + 1}" if total[id(c.module)] > 1 else ""), c.module, c.call)
        for c in chosen
    ]


def choose(model: nn.Module, calls: list[Call], usable: Callable[[Call], bool]) -> list[Call]:
    """Five to eight blocks in execution order.

    Start from the whole model and replace the deepest group of modules of one class by their children until there are
    enough blocks: wrappers (`self.model`, a Sequential, a ModuleList) are replaced at once, stages and Transformer
    layers are kept. Blocks have parameters; norms do not count. Four whole blocks are preferred to a choice from more
    than eight parts of them, and a block to its only layer. Of more than eight, eight at equal distances are chosen.
    """
    calls = [call for call in calls if usable(call) and _is_block(call.module)]
    ran = {id(call.module) for call in calls}
    frontier = _heads([model], ran)
    best: list[Call] = []
    while True:
        kept = [call for call in calls if any(call.module is module for module in frontier)]
        if len(best) >= 4 and len(kept) > MAX_NODES:
            break
        best = kept if len(kept) > len(best) else best
        groups: dict[type, list[nn.Module]] = {}
        for module in frontier:
            if _heads(list(module.children()), ran):
                groups.setdefault(type(module), []).append(module)
        if len(kept) >= MIN_NODES or not groups:
            break
        deepest = max(groups.values(), key=lambda group: sum(_depth(module, ran) for module in group))
        opened = {id(module) for module in deepest}
        frontier = [
            inner
            for module in frontier
            for inner in (_heads(list(module.children()), ran) if id(module) in opened else [module])
        ]
    if len(best) <= MAX_NODES:
        return best
    return [best[round(i * (len(best) - 1) / (MAX_NODES - 1))] for i in range(MAX_NODES)]


def _heads(modules: list[nn.Module], ran: set[int]) -> list[nn.Module]:
    """The topmost modules that ran: in place of a ModuleList, which never runs itself, its children."""
    heads: list[nn.Module] = []
    for module in modules:
        heads += [module] if id(module) in ran else _heads(list(module.children()), ran)
    return heads


def _depth(module: nn.Module, ran: set[int]) -> int:
    """How many modules ran inside."""
    return sum(id(inner) in ran for inner in module.modules())


def _is_block(module: nn.Module) -> bool:
    has_parameters = next(module.parameters(), None) is not None
    return has_parameters and "norm" not in type(module).__name__.lower()
