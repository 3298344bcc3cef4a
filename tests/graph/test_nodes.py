"""Which layers are measured: the automatic choice on typical models, names, patterns, repeated calls."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import curvmon
from curvmon.graph.nodes import resolve
from tests.helpers.networks import CalledTwice, Encoder, ResidualMLP, UNet
from tests.helpers.resnet import resnet18

SAMPLES = 4


def images(channels: int = 3, size: int = 32) -> Tensor:
    return torch.randn(SAMPLES, channels, size, size)


def chosen(model: nn.Module, x: Any, **options: Any) -> tuple[str, ...]:
    """The nodes of the cheapest possible measurement."""

    def loss(model: nn.Module, x: Any) -> Tensor:
        out = model(x)
        return F.mse_loss(out, torch.zeros_like(out))

    options.setdefault("loss", loss)
    return curvmon.measure(model, x, rtol=10, **options).nodes


class Lit(pl.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.criterion(self(batch[0]), batch[1])


def step(model: Any, batch: Any) -> Tensor:
    return model.training_step(batch, 0)


def mlp(layers: int) -> nn.Sequential:
    hidden = [layer for _ in range(layers) for layer in (nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU())]
    return nn.Sequential(*hidden, nn.Linear(6, 3))


def test_sequential_gives_weight_layers_without_output() -> None:
    assert chosen(mlp(5), torch.randn(SAMPLES, 6)) == ("0", "3", "6", "9", "12")


def test_deep_sequential_gives_equidistant_layers() -> None:
    result = [int(name) for name in chosen(mlp(20), torch.randn(SAMPLES, 6))]
    assert len(result) == 8 and result[0] == 0 and result[-1] == 57
    gaps = [b - a for a, b in itertools.pairwise(result)]
    assert max(gaps) - min(gaps) <= 3


def test_shallow_network_keeps_its_output() -> None:
    assert chosen(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)), torch.randn(SAMPLES, 6)) == ("0", "2")


def test_resnet_gives_stages() -> None:
    assert chosen(resnet18(), images()) == ("conv1", "layer1", "layer2", "layer3", "layer4")


def test_lightning_module_gives_blocks_of_its_network() -> None:
    batch = torch.randn(SAMPLES, 6), torch.randint(3, (SAMPLES,))
    assert chosen(Lit(mlp(5)), batch, loss=step) == ("model.0", "model.3", "model.6", "model.9", "model.12")
    batch = images(), torch.randint(10, (SAMPLES,))
    assert chosen(Lit(resnet18()), batch, loss=step) == (
        "model.conv1",
        "model.layer1",
        "model.layer2",
        "model.layer3",
        "model.layer4",
    )


def test_transformer_encoder_gives_layers() -> None:
    layers = tuple(f"encoder.layers.{i}" for i in range(5))
    assert chosen(Encoder(layers=5), torch.randn(SAMPLES, 4, 3)) == ("embed", *layers)


def test_short_transformer_gives_parts_of_layers() -> None:
    inner = tuple(f"encoder.layers.{i}.{part}" for i in range(2) for part in ("self_attn", "linear1", "linear2"))
    assert chosen(Encoder(layers=2), torch.randn(SAMPLES, 4, 3)) == ("embed", *inner)


def test_three_layers_are_kept_whole() -> None:
    """Opened, they would be nine pieces, of which eight are no sensible choice."""
    layers = tuple(f"encoder.layers.{i}" for i in range(3))
    assert chosen(Encoder(layers=3), torch.randn(SAMPLES, 4, 3)) == ("embed", *layers)


def test_block_is_preferred_to_its_only_layer() -> None:
    def stage(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

    model = nn.ModuleDict({"stem": stage(3, 4), "one": stage(4, 4), "two": stage(4, 4), "head": nn.Linear(4, 2)})

    def loss(m: Any, x: Tensor) -> Tensor:
        return F.cross_entropy(m["head"](m["two"](m["one"](m["stem"](x))).mean((2, 3))), torch.zeros(SAMPLES).long())

    assert chosen(model, images(size=4), loss=loss) == ("stem", "one", "two")


def test_unet_gives_both_arms() -> None:
    assert chosen(UNet(), images(1, 4)) == ("down1", "down2", "middle", "up2", "up1")


def test_residual_mlp_gives_blocks_of_its_module_list() -> None:
    expected = ("stem", *(f"blocks.{i}" for i in range(6)))
    assert chosen(ResidualMLP(depth=6), torch.randn(SAMPLES, 7)) == expected


def own_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def test_language_model_that_computes_its_own_loss() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=8, n_head=2, vocab_size=20, n_positions=8))
    ids = torch.randint(20, (SAMPLES, 5))
    result = curvmon.measure(model, {"input_ids": ids, "labels": ids}, loss=own_loss, rtol=10)
    assert result.nodes == ("transformer.wte", *(f"transformer.h.{i}" for i in range(6)))
    assert torch.isfinite(result.gn_gap).all()


def test_embeddings_are_not_opened_before_the_encoder() -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=500, max_position_embeddings=16, **sizes))
    batch = {"input_ids": torch.randint(20, (SAMPLES, 5)), "labels": torch.randint(2, (SAMPLES,))}
    result = chosen(model, batch, loss=own_loss)
    assert [name for name in result if ".layer." in name] == [f"bert.encoder.layer.{i}" for i in range(4)]


def test_parts_without_influence_are_skipped() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.unused = mlp(3), nn.Linear(6, 6)
            self.head = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

        def forward(self, x: Tensor) -> Tensor:
            self.unused(x)
            with torch.no_grad():
                x = self.backbone(x)
            return self.head(x)

    assert chosen(Frozen(), torch.randn(SAMPLES, 6)) == ("head.0", "head.2")


def test_modules_with_another_batch_dimension_are_noted() -> None:
    class SequenceFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x).transpose(0, 1)
            for layer in self.layers:
                h = layer(h)
            return self.head(h.mean(0))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    batch = torch.randint(20, (SAMPLES, 6)), torch.randint(3, (SAMPLES,))
    model = SequenceFirst()
    result = curvmon.measure(model, batch, loss=loss, rtol=10)
    assert any("batch_dim" in note for note in result.notes)
    right = curvmon.measure(model, batch, loss=loss, rtol=10, batch_dim=1)
    assert right.nodes == tuple(f"layers.{i}" for i in range(5))
    assert not any("entries along" in note for note in right.notes)


# Names and patterns


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (["stem", "blocks.*"], ("stem", "blocks.0", "blocks.1")),
        (["blocks.1", "stem"], ("stem", "blocks.1")),
        ("stem", ("stem",)),
        (["blocks.[0]"], ("blocks.0",)),
        (["**.up"], ("blocks.0.up", "blocks.1.up")),
        (["blocks.0", "blocks.0.up"], ("blocks.0.up", "blocks.0")),
        (["s*"], ("stem",)),
        (["*"], ("stem", "head")),
    ],
)
def test_names_and_patterns(wanted: Any, expected: tuple[str, ...]) -> None:
    assert chosen(ResidualMLP(), torch.randn(SAMPLES, 7), nodes=wanted) == expected


def test_star_matches_one_level() -> None:
    assert chosen(resnet18(), images(), nodes=["layer*"]) == ("layer1", "layer2", "layer3", "layer4")


def test_module_called_twice_is_two_nodes() -> None:
    x = torch.randn(SAMPLES, 7)
    assert chosen(CalledTwice(), x, nodes=["shared"]) == ("shared.call1", "shared.call2")
    assert chosen(CalledTwice(), x, nodes=["shared.call2", "stem"]) == ("stem", "shared.call2")


def test_model_itself_as_a_node() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x) * 2

    result = chosen(Root(), torch.randn(SAMPLES, 6), nodes=["", "model"])
    assert result == ("model", "root")
    assert chosen(Root(), torch.randn(SAMPLES, 6), nodes=list(result)) == result


def test_metrics_with_changing_hash() -> None:
    """torchmetrics hashes a metric by its state, which the forward pass changes."""
    from torchmetrics import MeanMetric

    class Measured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.metric = mlp(3), MeanMetric()

        def forward(self, x: Tensor) -> Tensor:
            out = self.net(x)
            self.metric(out.detach().mean())
            return out

    assert chosen(Measured(), torch.randn(SAMPLES, 6)) == ("net.0", "net.3", "net.6")


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("block.0", r"no module 'block.0'; did you mean 'blocks.0'"),
        ("zzzzzz", r"no module 'zzzzzz'; modules: stem, blocks"),
        ("layer*", r"pattern 'layer\*' matches no module. Modules: stem"),
        ("block*", r"matches no module that is called"),
        ("blocks", r"'blocks' is never called"),
    ],
)
def test_unknown_node_error_lists_nearest_names(wanted: str, message: str) -> None:
    with pytest.raises(curvmon.NodeError, match=message):
        chosen(ResidualMLP(), torch.randn(SAMPLES, 7), nodes=[wanted])


def test_call_that_did_not_happen() -> None:
    with pytest.raises(curvmon.NodeError, match="has no call 3"):
        chosen(CalledTwice(), torch.randn(SAMPLES, 7), nodes=["shared.call3"])


def test_node_without_floating_output() -> None:
    class Tokens(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x > 0).long()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.embed = Tokens(), nn.Embedding(2, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.embed(self.tokens(x))

    with pytest.raises(curvmon.NodeError, match="'tokens' returned Tensor, not a floating tensor"):
        chosen(Model(), torch.randn(SAMPLES, 3), nodes=["tokens"])


def test_no_calls_resolve_to_nothing() -> None:
    with pytest.raises(curvmon.NodeError, match="never called"):
        resolve(nn.Sequential(nn.Linear(2, 2)), [], ["0"])
