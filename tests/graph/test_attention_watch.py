"""Which attentions of a forward pass are seen, under which names, and with which values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from curvmon.graph.attention_statistics import attention_statistics
from curvmon.graph.attention_watch import AttentionWatch
from curvmon.records import AttentionSigns

HEADS, WIDTH, TOKENS, SAMPLES = 2, 8, 5, 3


def seen(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[AttentionSigns, ...]:
    watch = AttentionWatch(model)
    with watch():
        model(*args, **kwargs)
    return watch.signs()


def names(signs: tuple[AttentionSigns, ...]) -> list[str]:
    return [one.name for one in signs]


def heads_of(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def is_of(signs: AttentionSigns, q: Tensor, k: Tensor, *args: Any) -> None:
    logit, entropy = attention_statistics(q, k, *args).tolist()
    assert signs.largest_logit == pytest.approx(logit, rel=1e-5)
    assert signs.lowest_entropy == pytest.approx(entropy, rel=1e-5)


class Own(nn.Module):
    """An attention of its own, that shares keys among heads."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 2)
        self.options = options

    def projections(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return heads_of(self.q(x)), self.kv(x).unflatten(-1, (1, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, kv = self.projections(x)
        y: Tensor = F.scaled_dot_product_attention(q, kv, kv, enable_gqa=True, **self.options)
        return y.transpose(1, 2).flatten(-2)


X = torch.randn(SAMPLES, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_calls_are_named_after_their_modules() -> None:
    inner = Own(is_causal=True)
    model = nn.Sequential(inner, nn.Tanh(), Own(scale=0.7), inner)
    signs = seen(model, X)
    assert names(signs) == ["0.call1", "2", "0.call2"]
    is_of(signs[0], *inner.projections(X), None, True)
    x = torch.tanh(inner(X))
    is_of(signs[1], *model[2].projections(x), None, False, 0.7)
    assert names(seen(Own(), X)) == ["root"]
    with torch.compiler.set_stance("force_eager"):  # as in a pulse
        assert names(seen(nn.Sequential(torch.compile(Own(), backend="eager")), X)) == ["0"]


def test_a_model_without_attention_has_none() -> None:
    assert seen(nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Softmax(-1)), X) == ()


def test_each_pass_is_seen_by_itself() -> None:
    model = nn.Sequential(Own())
    watch = AttentionWatch(model)
    with watch():
        model(X)
        model(X)
    assert names(watch.signs()) == ["0.call1", "0.call2"]
    with watch():
        model(2 * X)
    model(X)
    assert watch.signs() == seen(model, 2 * X)


PADDED = torch.arange(TOKENS) >= torch.tensor([[5], [3], [4]])
FUTURE = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_multihead_attention(need_weights: bool, padded: bool, causal: bool) -> None:
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dropout=0.5)
    options = {"key_padding_mask": PADDED if padded else None, "attn_mask": FUTURE if causal else None}
    (signs,) = seen(nn.ModuleDict({"attention": model})["attention"], X, X, X, need_weights=need_weights, **options)
    q, k, _ = map(heads_of, F.linear(X, model.in_proj_weight, model.in_proj_bias).chunk(3, -1))
    allowed = torch.ones(SAMPLES, 1, TOKENS, TOKENS, dtype=torch.bool)
    allowed &= ~PADDED[:, None, None] if padded else True
    allowed &= ~FUTURE if causal else True
    is_of(signs, q, k, allowed)
    assert signs.name == "root"


@pytest.mark.parametrize("need_weights", [False, True])
def test_options_of_multihead_attention(need_weights: bool) -> None:
    """Other projections, a mask for every head, additional keys; and what it returns is what it returns unwatched."""
    model = nn.MultiheadAttention(WIDTH, HEADS, kdim=3, vdim=3, add_bias_kv=True, add_zero_attn=True).eval()
    query, key = X, torch.randn(4, TOKENS, 3)
    mask = torch.randn(TOKENS * HEADS, SAMPLES, 4)
    watch = AttentionWatch(model)
    with watch():
        result = model(query, key, key, need_weights=need_weights, attn_mask=mask)
    plain = model(query, key, key, need_weights=need_weights, attn_mask=mask)
    assert torch.equal(result[0], plain[0]) and (not need_weights or torch.equal(result[1], plain[1]))
    q = F.linear(query, model.q_proj_weight, model.in_proj_bias[:WIDTH])
    k = F.linear(key, model.k_proj_weight, model.in_proj_bias[WIDTH : 2 * WIDTH])
    k = torch.cat([k, model.bias_k.expand(1, TOKENS, -1), torch.zeros(1, TOKENS, WIDTH)])
    (signs,) = watch.signs()
    is_of(
        signs, heads_of(q.transpose(0, 1)), heads_of(k.transpose(0, 1)), F.pad(mask, (0, 2)).unflatten(0, (-1, HEADS))
    )
    unbatched = seen(model, query[:, 0], key[:, 0], key[:, 0], need_weights=need_weights)
    assert len(unbatched) == 1 and not math.isnan(unbatched[0].lowest_entropy)


def test_transformer_layers_in_training_mode() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True, dropout=0.3)
    model = nn.TransformerEncoder(layer, 2)
    torch.manual_seed(1)
    plain = model(X, mask=FUTURE, is_causal=True)
    torch.manual_seed(1)
    watch = AttentionWatch(model)
    with watch():
        watched = model(X, mask=FUTURE, is_causal=True)
    assert torch.equal(plain, watched)
    signs = watch.signs()
    assert names(signs) == ["layers.0.self_attn", "layers.1.self_attn"]
    inner = model.layers[0].self_attn
    q, k, _ = map(heads_of, F.linear(X, inner.in_proj_weight, inner.in_proj_bias).chunk(3, -1))
    is_of(signs[0], q, k, None, True)


@pytest.mark.parametrize("padded", [False, True])
def test_gpt2(padded: bool) -> None:
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=WIDTH, n_head=HEADS, vocab_size=11, n_positions=TOKENS, attn_implementation="sdpa")
    ).train()
    ids = torch.randint(11, (SAMPLES, TOKENS))
    signs = seen(model, ids, attention_mask=(~PADDED).long() if padded else None)
    assert names(signs) == ["transformer.h.0.attn", "transformer.h.1.attn"]
    model.eval()
    block = model.transformer.h[0]
    x = block.ln_1(model.transformer.wte(ids) + model.transformer.wpe.weight)
    q, k, _ = map(heads_of, block.attn.c_attn(x).chunk(3, -1))
    if not padded:  # dropout is before the first layer in training mode
        (first, _) = seen(model, ids)
        is_of(first, q, k, None, True)
    else:
        (first, _) = seen(model, ids, attention_mask=(~PADDED).long())
        is_of(first, q, k, ~FUTURE & ~PADDED[:, None, None])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_dropout(dtype: torch.dtype) -> None:
    model = nn.Sequential(Own(dropout_p=0.5))
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype):
        plain = model(X)
        torch.manual_seed(1)
        watch = AttentionWatch(model)
        with watch():
            watched = model(X)
        q, k = model[0].projections(X)
    assert torch.equal(plain, watched) and q.dtype == dtype
    is_of(watch.signs()[0], q, k)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_cannot_be_computed_is_skipped() -> None:
    """Under torch.func, and for tensors of a class of their own."""

    class Mapped(Own):
        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(super().forward)(x[:, None])[:, 0]

    assert seen(nn.Sequential(Mapped()), X) == ()
    nested = torch.nested.nested_tensor([X[0], X[1, :3]])
    watch = AttentionWatch(nn.Identity())
    q = nested.unsqueeze(1)
    with watch():
        F.scaled_dot_product_attention(q, q, q)
    assert watch.signs() == ()


def test_a_call_that_fails_fails_as_without() -> None:
    watch = AttentionWatch(nn.Identity())
    with watch(), pytest.raises(RuntimeError, match="Expected size"):
        F.scaled_dot_product_attention(X, X[..., :3], X)
    assert watch.signs() == ()
