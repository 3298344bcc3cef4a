"""How concentrated an attention is: its largest logit and its lowest entropy.

S = s Q K^T + mask,  P = softmax(S)
largest logit   max |S_ij| over the keys j that row i may attend to
lowest entropy  min over heads of the mean over rows of -Σ_j P_ij log P_ij / log n_i,   n_i > 1 keys for row i

An entropy of 1 is uniform attention, 0 a single key for every row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SAMPLES, MOST = 8, 2**20
"""that are looked at, and logits of them: all would take longer than a fused kernel, and memory"""
MASKED = -5e3
"""entries of an additive mask up to which a key counts as masked: -inf, the smallest number of a dtype, -1e4, -1e9"""


@torch.no_grad()
def attention_statistics(
    q: Tensor, k: Tensor, mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """(largest logit, lowest entropy), on the device of q; NaN for the entropy where no row has two keys.

    q: (..., heads, rows, width) or (..., rows, width); k: as many heads, or a number that divides them. Of the first
    `SAMPLES`, or of as many as have `MOST` logits; if one sample has more, of rows at equal distances in it. One
    product and one softmax.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    dtype = q.dtype if q.dtype == torch.float64 else torch.float32
    q, k, mask = _with_heads(q, k, mask)
    _, heads, rows, columns = *q.shape[:3], k.shape[2]
    size = heads * rows * columns
    samples, every = min(SAMPLES, max(1, MOST // size)), -(-size // MOST)
    part = slice(samples), slice(None), slice((rows - 1) % every, None, every)  # the last row sees all keys
    k = k[part[0]]
    if k.shape[1] < heads:
        k = k.repeat_interleave(heads // k.shape[1], 1)
    logits = torch.matmul(q[part].to(dtype) * scale, k.to(dtype).mT)
    allowed, bias = _mask(mask if mask is None else mask[part], is_causal, range(rows)[part[2]], logits)
    least, n_keys = logits, logits.new_full((1, 1, 1), columns)
    if allowed is not None:  # sums: filling what is masked takes ten times as long on a CPU
        least, n_keys = logits + torch.where(allowed, bias, math.inf), allowed.sum(-1)
        logits += torch.where(allowed, bias, -math.inf)
    extremes = torch.stack([logits.amax(), -least.amin()])
    entropy, counts = _row_entropies(logits, n_keys), (n_keys > 1).expand(logits.shape[:-1])
    means = entropy.sum((0, 2)) / counts.sum((0, 2))
    lowest = torch.where(counts.any(2).any(0), means, math.inf).amin()
    statistics = torch.stack([extremes.amax(), lowest])
    return statistics.masked_fill(statistics.isinf(), math.nan)


def _row_entropies(logits: Tensor, n_keys: Tensor) -> Tensor:
    """Normalised; 0 in rows of a single key. Overwrites the logits.

    -Σ p log p = -log max p - Σ p (z - max z): no logarithm of every entry, no cancellation of large logits.
    """
    p = logits.softmax(-1)
    below = logits.sub_(logits.amax(-1, keepdim=True)).clamp_(min=torch.finfo(logits.dtype).min)  # not 0 times -inf
    entropy = -p.amax(-1).log() - p.mul_(below).sum(-1)
    return torch.where(n_keys > 1, entropy / n_keys.clamp(min=2).to(entropy).log(), 0)


def _mask(mask: Tensor | None, is_causal: bool, rows: range, logits: Tensor) -> tuple[Tensor | None, Tensor]:
    """Which keys a row may attend to, None for all of them; and what is added to the logits there."""
    nothing = logits.new_zeros(())
    if mask is not None:
        return (mask, nothing) if mask.dtype == torch.bool else (mask > MASKED, mask.to(logits.dtype))
    if is_causal:
        row = torch.arange(rows.start, rows.stop, rows.step, device=logits.device)
        return (torch.arange(logits.shape[-1], device=logits.device) <= row[:, None])[None, None], nothing
    return None, nothing


def _with_heads(q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """(samples, heads, rows, ·), all of them; three dimensions are samples of one head."""
    if q.ndim < 4:
        q, k = q.unsqueeze(-3), k.unsqueeze(-3)
        mask = mask.unsqueeze(-3) if mask is not None and mask.ndim > 2 else mask
    lead: torch.Size = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3])  # type: ignore[no-untyped-call]
    shape = *lead, *q.shape[-3:-1], k.shape[-2]
    q, k = (x.expand(*lead, *x.shape[-3:]).reshape(-1, *x.shape[-3:]) for x in (q, k))
    return q, k, None if mask is None else mask.expand(shape).reshape(-1, *shape[-3:])
