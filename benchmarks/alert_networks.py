"""Networks of the families in `alert_families`: every layer in front of an activation is in a Sequential, every skip
connection in a `Skip`, and the head comes last, so that `alert_events` finds them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

Activation = Callable[[], nn.Module]


class Skip(nn.Module):
    """y = x + branch(x); without its skip connection y = branch(x)."""

    def __init__(self, *branch: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*branch)
        self._skip = True

    def cut(self) -> None:
        self._skip = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.branch(x)
        return x + y if self._skip else y


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        shape = samples, tokens, self.heads, width // self.heads
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        attended = scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        y: Tensor = self.out(attended.transpose(1, 2).reshape(x.shape))
        return y


class Transposed(nn.Module):
    """`inner` on the last two dimensions, exchanged: mixes tokens instead of channels."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.transpose(1, 2)).transpose(1, 2)
        return y


class Patches(nn.Module):
    """An image as a sequence of patches, with learned positions."""

    def __init__(self, channels: int, side: int, patch: int, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, width))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.project(x).flatten(2).transpose(1, 2) + self.positions
        return y


class MeanOverTokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class CharacterTransformer(nn.Module):
    """Pre-norm, with learned positions."""

    def __init__(self, vocabulary: int, tokens: int, width: int = 32, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.blocks = nn.Sequential(*(block for _ in range(layers) for block in _encoder(width, heads, 0.1, True)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.embed(ids) + self.positions)))
        return logits


class CharacterLSTM(nn.Module):
    def __init__(self, vocabulary: int, width: int = 48) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(vocabulary, 24), nn.LSTM(24, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.inner(self.embed(ids))[0])
        return logits


class VAE(nn.Module):
    """Logits of the pixels, mean and log variance of the code; noise in training only."""

    def __init__(self, inputs: int, width: int = 64, code: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 2 * code))
        self.decoder = nn.Sequential(nn.Linear(code, width), nn.ReLU(), nn.Linear(width, inputs))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance


def mlp(
    inputs: int, width: int, outputs: int, activation: Activation, depth: int = 3, dropout: float = 0.0
) -> nn.Module:
    widths = [inputs, *([width] * depth)]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def vgg(channels: int, side: int, width: int) -> nn.Module:
    """No batch norm."""

    def stage(before: int, after: int) -> nn.Sequential:
        first, second = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.MaxPool2d(2))

    body = stage(channels, width), stage(width, 2 * width)
    dense = nn.Sequential(nn.Linear(2 * width * (side // 4) ** 2, 64), nn.ReLU())
    model = nn.Sequential(*body, nn.Flatten(), dense, nn.Linear(64, 10))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model


def plain_convolutions(channels: int, width: int) -> nn.Module:
    """Batch norm after every convolution."""

    def layer(before: int, after: int, stride: int) -> nn.Sequential:
        convolution = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU())

    body = layer(channels, width, 1), layer(width, 2 * width, 2), layer(2 * width, 2 * width, 1)
    last = layer(2 * width, 4 * width, 2)
    return nn.Sequential(*body, last, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def residual(
    channels: int, width: int, blocks: int, activation: Activation, norm: Callable[[int], nn.Module]
) -> nn.Module:
    def convolution(before: int) -> nn.Module:
        return nn.Conv2d(before, width, 3, padding=1, bias=False)

    stem = nn.Sequential(convolution(channels), norm(width), activation(), nn.AvgPool2d(2))
    body = (
        nn.Sequential(
            Skip(convolution(width), norm(width), activation(), convolution(width), norm(width)), activation()
        )
        for _ in range(blocks)
    )
    return nn.Sequential(stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def vision_transformer(channels: int, side: int, width: int = 32, layers: int = 2) -> nn.Module:
    body = [block for _ in range(layers) for block in _encoder(width, 2, 0.1, False)]
    return nn.Sequential(
        Patches(channels, side, 2, width), *body, nn.LayerNorm(width), MeanOverTokens(), nn.Linear(width, 10)
    )


def mixer(channels: int, side: int, width: int = 32, layers: int = 2) -> nn.Module:
    tokens = (side // 2) ** 2
    body: list[nn.Module] = []
    for _ in range(layers):
        token_mlp = Transposed(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        body += [Skip(nn.LayerNorm(width), token_mlp), _feed_forward(width, 0.0)]
    return nn.Sequential(
        Patches(channels, side, 2, width), *body, nn.LayerNorm(width), MeanOverTokens(), nn.Linear(width, 10)
    )


def _encoder(width: int, heads: int, dropout: float, causal: bool) -> tuple[nn.Module, nn.Module]:
    attention = nn.LayerNorm(width), SelfAttention(width, heads, causal), nn.Dropout(dropout)
    return Skip(*attention), _feed_forward(width, dropout)


def _feed_forward(width: int, dropout: float) -> nn.Module:
    hidden = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
    return Skip(nn.LayerNorm(width), *hidden, *([nn.Dropout(dropout)] if dropout else []))
