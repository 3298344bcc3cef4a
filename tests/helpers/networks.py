"""Networks for the tests, each written twice: as a module, and by hand with its perturbations explicit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES, CLASSES, WIDTH = 6, 5, 32


class ResidualMLP(nn.Module):
    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))

    def __init__(self, inputs: int = 7, width: int = WIDTH, depth: int = 2, classes: int = CLASSES) -> None:
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(self.Block(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def residual_mlp_by_hand(m: ResidualMLP, x: Tensor, e: Sequence[Tensor]) -> list[Tensor]:
    h = x @ m.stem.weight.T + m.stem.bias + e[0]
    for block, shift in zip(m.blocks, e[1:]):
        z = (h - h.mean(-1, keepdim=True)) / (h.var(-1, unbiased=False, keepdim=True) + block.norm.eps).sqrt()
        z = z * block.norm.weight + block.norm.bias
        z = z @ block.up.weight.T + block.up.bias
        z = z * 0.5 * (1 + torch.erf(z / math.sqrt(2)))
        h = h + z @ block.down.weight.T + block.down.bias + shift
    return [h @ m.head.weight.T + m.head.bias]


def relu_mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(7, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, CLASSES)
    )


class RowAttention(nn.Module):
    """Attention and a layer norm over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(3), nn.Linear(3, 9)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Diamond(nn.Module):
    """Two branches that meet in a sum or in a concatenation, then an activation and a linear head."""

    def __init__(self, merge: str, activation: Callable[[Tensor], Tensor], width: int = WIDTH) -> None:
        super().__init__()
        self.merge, self.activation = merge, activation
        self.left, self.right = nn.Linear(7, width), nn.Linear(7, width)
        self.join = nn.Linear(width if merge == "sum" else 2 * width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.left(x), self.right(x)
        merged = a + b if self.merge == "sum" else torch.cat([a, b], dim=-1)
        return self.head(self.activation(self.join(merged)))


def diamond_by_hand(m: Diamond, x: Tensor, e: Sequence[Tensor]) -> list[Tensor]:
    a, b = m.left(x) + e[0], m.right(x) + e[1]
    merged = a + b if m.merge == "sum" else torch.cat([a, b], dim=-1)
    return [m.head(m.activation(m.join(merged) + e[2]))]


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(6, CLASSES)
        for bn in (self.bn1, self.bn2):
            bn.running_mean.normal_()
            bn.running_var.uniform_(0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(self.relu(self.bn2(self.conv2(x))), 2)
        return self.head(x.flatten(1))


def conv_by_hand(m: ConvNet, x: Tensor, e: Sequence[Tensor]) -> list[Tensor]:
    def norm(bn: nn.BatchNorm2d, h: Tensor) -> Tensor:
        h = (h - bn.running_mean[:, None, None]) / (bn.running_var[:, None, None] + bn.eps).sqrt()
        return h * bn.weight[:, None, None] + bn.bias[:, None, None]

    h = F.max_pool2d((norm(m.bn1, m.conv1(x) + e[0])).clamp_min(0), 2)
    h = F.max_pool2d((norm(m.bn2, m.conv2(h) + e[1])).clamp_min(0), 2)
    return [m.head(h.flatten(1))]


class Recurrent(nn.Module):
    """Returns tuples inside: the LSTM and GRU modules are tapped at their first tensor."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 6)
        self.rnn = kind(6, 5, batch_first=True)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.rnn(torch.tanh(self.embed(x)))
        return self.head(torch.tanh(states).mean(1))


def lstm_by_hand(m: Recurrent, x: Tensor, e: Sequence[Tensor]) -> list[Tensor]:
    inputs = torch.tanh(m.embed(x) + e[0])
    h = c = inputs.new_zeros(len(x), 5)
    states = []
    for t in range(x.shape[1]):
        gates = inputs[:, t] @ m.rnn.weight_ih_l0.T + m.rnn.bias_ih_l0 + h @ m.rnn.weight_hh_l0.T + m.rnn.bias_hh_l0
        i, f, g, o = gates.chunk(4, dim=-1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        states.append(h)
    return [m.head(torch.tanh(torch.stack(states, 1) + e[1]).mean(1))]


def gru_by_hand(m: Recurrent, x: Tensor, e: Sequence[Tensor]) -> list[Tensor]:
    inputs = torch.tanh(m.embed(x) + e[0])
    h = inputs.new_zeros(len(x), 5)
    states = []
    for t in range(x.shape[1]):
        i_r, i_z, i_n = (inputs[:, t] @ m.rnn.weight_ih_l0.T + m.rnn.bias_ih_l0).chunk(3, dim=-1)
        h_r, h_z, h_n = (h @ m.rnn.weight_hh_l0.T + m.rnn.bias_hh_l0).chunk(3, dim=-1)
        r, z = (i_r + h_r).sigmoid(), (i_z + h_z).sigmoid()
        h = (1 - z) * (i_n + r * h_n).tanh() + z * h
        states.append(h)
    return [m.head(torch.tanh(torch.stack(states, 1) + e[1]).mean(1))]


class Attention(nn.Module):
    def __init__(self, heads: int, width: int = 6) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._split(layer(x)) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.head(mixed.transpose(1, 2).flatten(2).mean(1))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def attention_by_hand(m: Attention, x: Tensor, e: Sequence[Tensor]) -> list[Tensor]:
    q, k, v = (x @ layer.weight.T + shift for layer, shift in zip((m.q, m.k, m.v), e))
    size = q.shape[-1] // m.heads
    mixed = []
    for i in range(m.heads):
        part = slice(i * size, (i + 1) * size)
        weights = (q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(size)).softmax(-1)
        mixed.append(weights @ v[..., part])
    return [m.head(torch.cat(mixed, dim=-1).mean(1))]


class Encoder(nn.Module):
    def __init__(self, layers: int = 2, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(3, width)
        layer = nn.TransformerEncoderLayer(width, 2, 10, dropout=0.1, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)).mean(1))


def encoder_by_hand(m: Encoder, x: Tensor, e: Sequence[Tensor]) -> list[Tensor]:
    def attend(a: nn.MultiheadAttention, h: Tensor) -> Tensor:
        q, k, v = (h @ a.in_proj_weight.T + a.in_proj_bias).chunk(3, dim=-1)
        mixed = []
        for one, two, three in zip(*(part.chunk(a.num_heads, dim=-1) for part in (q, k, v))):
            mixed.append((one @ two.transpose(1, 2) / math.sqrt(one.shape[-1])).softmax(-1) @ three)
        return torch.cat(mixed, dim=-1) @ a.out_proj.weight.T + a.out_proj.bias

    h = m.embed(x) + e[0]
    for layer, shift in zip(m.encoder.layers, e[1:]):
        h = layer.norm1(h + attend(layer.self_attn, h))
        h = layer.norm2(h + layer.linear2(F.gelu(layer.linear1(h)))) + shift
    return [m.head(h.mean(1))]


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.shared, self.head = nn.Linear(7, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.stem(x))
        return self.head(torch.tanh(self.shared(torch.tanh(self.shared(h)))))


def called_twice_by_hand(m: CalledTwice, x: Tensor, e: Sequence[Tensor]) -> list[Tensor]:
    h = torch.tanh(m.stem(x) + e[0])
    h = torch.tanh(m.shared(h) + e[1])
    return [m.head(torch.tanh(m.shared(h) + e[2]))]


class UNet(nn.Module):
    def __init__(self, channels: int = 2) -> None:
        super().__init__()
        c = channels
        self.down1, self.down2 = nn.Conv2d(1, c, 3, padding=1), nn.Conv2d(c, 2 * c, 3, padding=1)
        self.middle = nn.Conv2d(2 * c, 2 * c, 3, padding=1)
        self.up2, self.up1 = nn.Conv2d(4 * c, c, 3, padding=1), nn.Conv2d(2 * c, c, 3, padding=1)
        self.head = nn.Linear(c, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        one = F.silu(self.down1(x))
        two = F.silu(self.down2(F.avg_pool2d(one, 2)))
        low = F.interpolate(F.silu(self.middle(F.avg_pool2d(two, 2))), scale_factor=2.0)
        mid = F.interpolate(F.silu(self.up2(torch.cat([two, low], 1))), scale_factor=2.0)
        return self.head(F.silu(self.up1(torch.cat([one, mid], 1))).mean((2, 3)))


def unet_by_hand(m: UNet, x: Tensor, e: Sequence[Tensor]) -> list[Tensor]:
    def double(h: Tensor) -> Tensor:
        return h.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)

    one = F.silu(m.down1(x) + e[0])
    two = F.silu(m.down2(F.avg_pool2d(one, 2)) + e[1])
    low = double(F.silu(m.middle(F.avg_pool2d(two, 2)) + e[2]))
    mid = double(F.silu(m.up2(torch.cat([two, low], 1)) + e[3]))
    return [m.head(F.silu(m.up1(torch.cat([one, mid], 1)) + e[4]).mean((2, 3)))]


class TwoHeads(nn.Module):
    """The second head also sees the first head's output: both are inputs of the loss, one is upstream of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.trunk = nn.Linear(7, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH + CLASSES, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.trunk(torch.tanh(self.stem(x))))
        first = self.first(h)
        return first, self.second(torch.cat([h, torch.tanh(first)], -1))


def two_heads_by_hand(m: TwoHeads, x: Tensor, e: Sequence[Tensor]) -> list[Tensor]:
    h = torch.tanh(m.trunk(torch.tanh(m.stem(x) + e[0])) + e[1])
    first = m.first(h)
    return [first, m.second(torch.cat([h, torch.tanh(first)], -1))]


class Contrastive(nn.Module):
    """Similarities of all samples with each other: the samples of the batch interact."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.project = nn.Linear(7, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        z = F.normalize(self.project(torch.tanh(self.stem(x))), dim=-1)
        return (z @ z.T / 0.5)[:, :CLASSES]


def contrastive_by_hand(m: Contrastive, x: Tensor, e: Sequence[Tensor]) -> list[Tensor]:
    z = m.project(torch.tanh(m.stem(x) + e[0])) + e[1]
    z = z / z.square().sum(-1, keepdim=True).sqrt()
    return [(z @ z.T / 0.5)[:, :CLASSES]]
