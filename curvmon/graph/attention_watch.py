"""Watch the attentions of a forward pass: `F.scaled_dot_product_attention`, and those in `nn.MultiheadAttention`."""

from __future__ import annotations

import inspect
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from curvmon.graph.attention_statistics import attention_statistics
from curvmon.graph.nodes import ROOT, clean_name
from curvmon.isolation.patches import is_transformed
from curvmon.records import AttentionSigns


class AttentionWatch:
    """Within `watch()`, the statistics of every attention that is called; `signs` reads them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: list[tuple[str, Tensor]] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """One forward pass; what an earlier one has left is dropped."""
        self._seen = []
        names = {id(module): clean_name(name) or ROOT for name, module in self._model.named_modules()}
        with _Watching(lambda statistics: self._seen.append((_caller(names), statistics))):
            yield

    def signs(self) -> tuple[AttentionSigns, ...]:
        """In the order of the calls, by the innermost module that made them; `.call2` is its second. Waits once."""
        if not self._seen:
            return ()
        device = self._seen[0][1].device
        values = torch.stack([statistics.to(device, torch.float64) for _, statistics in self._seen]).tolist()
        total, calls, signs = Counter(name for name, _ in self._seen), Counter[str](), []
        for (name, _), (logit, entropy) in zip(self._seen, values):
            calls[name] += 1
            signs.append(AttentionSigns(name + (f".call{calls[name]}" if total[name] > 1 else ""), logit, entropy))
        return tuple(signs)


def _caller(names: Mapping[int, str]) -> str:
    """The innermost module that runs. From the stack: hooks on all modules take longer than small attentions."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            name = names.get(id(frame.f_locals.get("self")))
            if name is not None:
                return name
        frame = frame.f_back
    return ROOT


class _Watching(TorchFunctionMode):
    def __init__(self, report: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._report = report
        self._heads: int | None = None
        """of the multi-head attention that is running, 0 once it has been seen"""
        self._watched = {F.scaled_dot_product_attention, F.multi_head_attention_forward, torch.bmm, torch.baddbmm}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in self._watched:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._guarded(self._fused, args, kwargs)
        elif func is F.multi_head_attention_forward and self._heads is None:
            return self._inside(func, args, kwargs)
        elif self._heads and func in (torch.bmm, torch.baddbmm):
            self._guarded(self._composed, args, kwargs)
        return func(*args, **kwargs)

    def _inside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function with this mode active: torch hands it over as a whole, and its calls would not be seen."""
        if not isinstance(func, types.FunctionType):
            return func(*args, **kwargs)
        own = {**func.__globals__, "has_torch_function": lambda tensors: False}
        body = types.FunctionType(func.__code__, own, func.__name__, func.__defaults__, func.__closure__)
        self._heads = args[4] if len(args) > 4 else kwargs["num_heads"]
        try:
            with self:
                return body(*args, **kwargs)
        finally:
            self._heads = None

    def _guarded(self, see: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An attention that is not understood, or has no memory left, must not cost the pulse."""
        try:
            if not is_transformed():
                see(*args, **kwargs)
        except Exception:
            return

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        """Arguments as those of F.scaled_dot_product_attention."""
        self._see(query, key, attn_mask, is_causal, scale)

    def _composed(self, *args: Tensor) -> None:
        """The first product of an attention that returns its weights: s Q K^T, or mask + s Q K^T."""
        *masks, q, k_transposed = args
        heads, self._heads = self._heads or 1, 0
        mask = masks[0] if masks else None
        q, k = (x.reshape(-1, heads, *x.shape[1:]) for x in (q, k_transposed.mT))
        if mask is not None:
            mask = mask.reshape(-1, heads if len(mask) > 1 else 1, *mask.shape[1:])
        self._see(q, k, mask, False, 1.0)

    def _see(self, q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> None:
        given = [q, k] if mask is None else [q, k, mask]
        plain = all(type(x) in (Tensor, nn.Parameter) and not x.is_nested and x.numel() for x in given)
        if not plain or not q.is_floating_point():
            return
        with _full_precision(q.device.type):
            self._report(attention_statistics(q, k, mask, is_causal, scale))


def _full_precision(device: str) -> AbstractContextManager[Any]:
    """A model may use autocast itself."""
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()
