"""The largest logit and the lowest entropy of attentions, against dense float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from curvmon.graph import attention_statistics as module
from curvmon.graph.attention_statistics import attention_statistics


def dense(q: Tensor, k: Tensor, allowed: Tensor, bias: Any = 0.0, scale: float | None = None) -> tuple[float, float]:
    """Row by row; q and k: (samples, heads, rows, width), `allowed` and `bias`: of the logits."""
    logits = q.double() @ k.double().mT * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    allowed = allowed.expand(logits.shape)
    means = []
    for head in range(q.shape[1]):
        entropies = []
        for row, mask in zip(logits[:, head].flatten(0, 1), allowed[:, head].flatten(0, 1)):
            p = row[mask].softmax(0)
            if len(p) > 1:
                entropies.append(-(p * p.log()).sum().item() / math.log(len(p)))
        means.append(sum(entropies) / len(entropies) if entropies else math.inf)
    return logits[allowed].abs().max().item(), min(means)


def tensors(*shapes: tuple[int, ...], scale: float = 1.5, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def equal(q: Tensor, k: Tensor, expected: tuple[float, float], *args: Any, **options: Any) -> None:
    for dtype, rel in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        statistics = attention_statistics(q.to(dtype), k.to(dtype), *args, **options)
        assert statistics.dtype == dtype and statistics.tolist() == pytest.approx(expected, rel=rel)


ALL = torch.ones((), dtype=torch.bool)
Q, K = tensors((3, 4, 6, 5), (3, 4, 7, 5))


def test_no_mask_and_scale() -> None:
    equal(Q, K, dense(Q, K, ALL))
    equal(Q, K, dense(Q, K, ALL, scale=0.3), scale=0.3)
    equal(Q, -K, dense(Q, -K, ALL))  # in one of the two, the largest is negative


@pytest.mark.parametrize("columns", [4, 6, 9])
def test_causal(columns: int) -> None:
    (k,) = tensors((3, 4, columns, 5), seed=1)
    equal(Q, k, dense(Q, k, torch.ones(6, columns, dtype=torch.bool).tril()), is_causal=True)


@pytest.mark.parametrize("shape", [(6, 7), (1, 1, 6, 7), (3, 1, 1, 7), (3, 4, 6, 7), (4, 6, 1)])
def test_masks(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(2)
    allowed = torch.rand(shape, generator=generator) > 0.5
    equal(Q, K, dense(Q, K, allowed), allowed)
    bias = torch.randn(shape, generator=generator, dtype=torch.float64)
    for closed in (-math.inf, torch.finfo(torch.float32).min, -1e4):
        mask = torch.where(allowed, bias, closed)
        equal(Q, K, dense(Q, K, allowed, bias), mask)


def test_rows_without_keys_do_not_count() -> None:
    allowed = torch.ones(6, 7, dtype=torch.bool)
    allowed[1], allowed[2, 1:] = False, False
    equal(Q, K, dense(Q, K, allowed), allowed)
    nothing = attention_statistics(Q, K, torch.zeros(6, 7, dtype=torch.bool))
    assert nothing.isnan().all()
    logit, entropy = attention_statistics(Q, K[:, :, :1]).tolist()
    assert logit == pytest.approx(dense(Q, K[:, :, :1], ALL)[0]) and math.isnan(entropy)


def test_heads_that_share_keys() -> None:
    k = K[:, :2]
    equal(Q, k, dense(Q, k.repeat_interleave(2, 1), ALL))


def test_other_numbers_of_dimensions() -> None:
    """Three are samples of one head; more than four are samples."""
    one = dense(Q[0][:, None], K[0][:, None], ALL)
    equal(Q[0], K[0], one)
    equal(Q[0, 0], K[0, 0], dense(Q[:1, :1], K[:1, :1], ALL))
    mask = torch.rand((4, 6, 7), generator=torch.Generator().manual_seed(0)) > 0.5
    equal(Q[0], K[0], dense(Q[0][:, None], K[0][:, None], mask[:, None]), mask)
    equal(Q[None].expand(2, -1, -1, -1, -1), K[None], dense(Q, K, ALL))


def test_entropy_from_uniform_to_a_single_key() -> None:
    assert attention_statistics(0 * Q, K).tolist() == pytest.approx([0, 1])
    logit, entropy = attention_statistics(1e4 * Q, K).tolist()
    assert logit > 1e4 and 0 <= entropy < 1e-2
    one_head = Q.clone()
    one_head[:, 1:] = 0
    assert attention_statistics(one_head, K)[1] < 0.9


def test_half_precision_is_computed_in_single() -> None:
    q, k = Q.bfloat16(), K.bfloat16()
    statistics = attention_statistics(q, k, torch.zeros(6, 7, dtype=torch.bfloat16))
    assert statistics.dtype == torch.float32 and statistics.tolist() == pytest.approx(dense(q, k, ALL), rel=1e-5)


def test_values_that_are_not_finite_are_not_numbers() -> None:
    q = Q.clone()
    q[0, 0, 0, 0] = math.nan
    assert attention_statistics(q, K).isnan().all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_large_attentions_are_sampled(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = torch.ones(6, 6, dtype=torch.bool)
    allowed = allowed.tril() if is_causal else allowed
    q, k = tensors((12, 4, 6, 5), (12, 4, 6, 5), seed=3)
    equal(q, k, dense(q[: module.SAMPLES], k[: module.SAMPLES], allowed), is_causal=is_causal)
    monkeypatch.setattr(module, "MOST", 2 * 4 * 6 * 6)  # two samples
    equal(q, k, dense(q[:2], k[:2], allowed), is_causal=is_causal)
    monkeypatch.setattr(module, "MOST", 4 * 6 * 6 // 2)  # every second row, the last one among them
    equal(q, k, dense(q[:1, :, 1::2], k[:1], allowed[1::2]), is_causal=is_causal)
    mask = torch.where(allowed, 0.5, -math.inf)
    equal(q, k, dense(q[:1, :, 1::2], k[:1], allowed[1::2], 0.5), mask)


def test_random_numbers_and_gradients_are_left_alone() -> None:
    q, k = Q.clone().requires_grad_(), K.clone()
    before = torch.get_rng_state()
    assert not attention_statistics(q, k).requires_grad
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(q, Q) and torch.equal(k, K)
    assert F.scaled_dot_product_attention(q, k, k).requires_grad
