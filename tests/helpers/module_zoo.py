"""LightningModules as people write them, each with data and with its loss written a second time, by hand.

`Case` is measured: what the monitor finds must be what `curvmon.measure` finds with that loss. `Declined` is not, or
only in part, with a message that says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate
from torchmetrics.classification import MulticlassAccuracy

BATCH = 16
PROBE = 32


@dataclass(frozen=True)
class Case:
    module: Callable[[], pl.LightningModule]
    train: Sequence[Any]
    val: Sequence[Any] | None
    loss: Callable[[Any, Any], Tensor]
    """of the module and the probe batch, apart from training_step"""
    collate: Callable[[list[Any]], Any] = default_collate
    val_collate: Callable[[list[Any]], Any] | None = None
    val_batch: int = BATCH
    probe: int = PROBE
    """samples that are measured"""
    of: str = "val"
    """the loader that they come from"""
    note: str = ""
    """one that must be there"""
    gap: bool = True
    """GN-Gap is defined"""
    warns: tuple[str, ...] = ()
    initial: bool = True
    """measured before the first step as well"""
    second_val: Sequence[Any] | None = None
    """of another validation loader"""
    options: dict[str, Any] = field(default_factory=dict)
    """of the monitor; none, as a rule"""

    def loaders(self) -> tuple[Any, Any]:
        train = DataLoader(self.train, BATCH, collate_fn=self.collate)
        if self.val is None:
            return train, None
        val = DataLoader(self.val, self.val_batch, collate_fn=self.val_collate or self.collate)
        return train, val if self.second_val is None else [val, DataLoader(self.second_val, BATCH)]

    def probe_batch(self) -> Any:
        """Collated again from the first samples: not a matter of slicing batches."""
        samples = self.val if self.of == "val" else self.train
        assert samples is not None
        collate = (self.val_collate or self.collate) if self.of == "val" else self.collate
        return collate([samples[i] for i in range(self.probe)])


@dataclass(frozen=True)
class Declined:
    module: Callable[[], pl.LightningModule]
    train: Sequence[Any]
    reason: str
    """what the one warning says"""
    collate: Callable[[list[Any]], Any] = default_collate

    def loaders(self) -> tuple[Any, Any]:
        return tuple(DataLoader(self.train, BATCH, collate_fn=self.collate) for _ in range(2))  # type: ignore[return-value]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def rows(*columns: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*columns))


class Lit(pl.LightningModule):
    """What all of them share: small steps, and a validation that does nothing."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        return None


# ---- images ----


class ImageClassifier(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.body = nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.SiLU())
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.body(self.stem(x)).mean((2, 3))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))


class UNet(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GELU())
        self.bottom = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.GELU())
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.merge = nn.Sequential(nn.Conv2d(8, 4, 3, padding=1), nn.GELU())
        self.classify = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        return self.classify(self.merge(torch.cat([skip, self.up(self.bottom(skip))], 1)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, masks = batch
        return F.cross_entropy(self(images), masks)


class VAE(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(12, 10), nn.Tanh())
        self.moments = nn.Linear(10, 6)
        self.decode = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 12))

    def terms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.moments(self.encode(x)).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        return F.mse_loss(self.decode(z), x), divergence

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        reconstruction, divergence = self.terms(batch)
        self.log_dict({"reconstruction": reconstruction, "divergence": divergence})
        return reconstruction + 0.1 * divergence


class Autoencoder(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 12))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.decoder(self.encoder(batch)), batch)


class GAN(Lit):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        fake = self.generator(torch.randn(len(batch), 4))
        ones, zeros = torch.ones(len(batch), 1), torch.zeros(len(batch), 1)
        d_loss = F.binary_cross_entropy_with_logits(self.discriminator(batch), ones)
        d_loss = d_loss + F.binary_cross_entropy_with_logits(self.discriminator(fake.detach()), zeros)
        second.zero_grad()
        self.manual_backward(d_loss)
        second.step()
        g_loss = F.binary_cross_entropy_with_logits(self.discriminator(fake), ones)
        first.zero_grad()
        self.manual_backward(g_loss)
        first.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), 1e-3) for part in (self.generator, self.discriminator)]


def discriminator_loss(module: Any, batch: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(module.discriminator(batch), torch.ones(len(batch), 1))


# ---- several views or samples that see each other ----


class SimCLR(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 12), nn.GELU())
        self.projection = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 6))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nt_xent(torch.cat([self.projection(self.backbone(view)) for view in batch]))


class JoinedViews(SimCLR):
    """Both views in one pass: the layers see twice as many rows as there are samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nt_xent(self.projection(self.backbone(torch.cat(batch))))


def nt_xent(z: Tensor) -> Tensor:
    z = F.normalize(z, dim=-1)
    similarity = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    return F.cross_entropy(similarity, torch.arange(len(z)).roll(len(z) // 2))


def simclr_loss(module: Any, batch: Any) -> Tensor:
    first, second = (module.projection(module.backbone(view)) for view in batch)
    z, n = F.normalize(torch.cat([first, second]), dim=-1), len(first)
    similarity = (z @ z.T / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
    return F.cross_entropy(similarity, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))


class Triplet(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        anchor, positive, negative = (self.embed(x) for x in batch)
        return F.triplet_margin_loss(anchor, positive, negative, margin=2.0)


# ---- text and sequences ----


class Output(dict[str, Any]):
    """As Hugging Face's ModelOutput: a mapping with attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class OwnLossModel(nn.Module):
    """A language model that computes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True) for _ in range(3))
        self.head = nn.Linear(8, 11)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        x = self.embed(input_ids)
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits = self.head(x)
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(logits=logits, loss=loss)


class LanguageModel(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.model = OwnLossModel()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**batch).loss


class LossInDict(LanguageModel):
    """Returns what the model returned: a mapping with "loss" and more."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = self.model(**batch)
        return {"loss": found["loss"], "logits": found["logits"].detach()}


class HuggingFace(Lit):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = self.model(**batch)
        self.log("loss", found.loss)
        return found.loss


def gpt2() -> pl.LightningModule:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 17, "n_positions": 8, "n_embd": 8, "n_layer": 3, "n_head": 2}
    return HuggingFace(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)))


def bert() -> pl.LightningModule:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 17, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(**sizes, intermediate_size=16, max_position_embeddings=8, num_labels=3)
    return HuggingFace(BertForSequenceClassification(config))


def encoded(samples: list[dict[str, Tensor]]) -> Any:
    """A tokenizer's BatchEncoding, which is a mapping but no dict."""
    from transformers import BatchEncoding

    return BatchEncoding(default_collate(samples))


class LSTM(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.lstm = nn.LSTM(6, 7, num_layers=2, batch_first=True, dropout=0.2)
        self.hidden = nn.Linear(7, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(tokens))
        return self.head(torch.tanh(self.hidden(states[:, -1])))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


class SpeechRecogniser(Lit):
    """CTC has no second derivative: everything comes from differences of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, targets = batch
        scores = self.head(self.frames(x)).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(x),), x.shape[1]), torch.full((len(x),), targets.shape[1])
        return F.ctc_loss(scores, targets, *lengths)


class BagOfWords(Lit):
    """Nor has EmbeddingBag, but only by its weights: the layers behind it are measured as any others."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 6)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.body(self.bag(batch[0]))), batch[1])


class Recommender(Lit):
    """Two embeddings and a small network on their product."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(12, 6), nn.Embedding(15, 6)
        self.score = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return self.score(self.users(users) * self.items(items)).squeeze(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        users, items, liked = batch
        return F.binary_cross_entropy_with_logits(self(users, items), liked)


# ---- shapes of a step and of a batch ----


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 10), nn.Tanh(), nn.Linear(10, 9), nn.Tanh(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, outputs)
    )


class Regression(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])


def regression_loss(module: Any, batch: Any) -> Tensor:
    return F.mse_loss(module.net(batch[0]), batch[1])


class ParametersAlone(Lit):
    """Its parameters are used directly: there is no layer to look at, but a Hessian."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(drawn(6, 2) / 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss((batch[0] @ self.weight).sigmoid(), batch[1])


class ReturnsDict(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        predicted = self(batch[0])
        return {"loss": F.mse_loss(predicted, batch[1]), "predicted": predicted.detach()}


class BatchAlone(Regression):
    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        return F.mse_loss(self(batch[0]), batch[1])


class AnyArguments(Regression):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        (x, y), _ = args
        return F.mse_loss(self(x), y)


class SeveralLoaders(Regression):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        return None


class Criterion(Lit):
    """The network behind `self.model`, the loss a module of its own, with class weights."""

    def __init__(self) -> None:
        super().__init__()
        self.model = mlp(6, 3)
        self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]), label_smoothing=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.criterion(self(batch[0]), batch[1])


class WithMetrics(Criterion):
    """torchmetrics in the step, logged as an object and as a value; a print, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        logits = self(batch[0])
        loss = self.criterion(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict({"loss": loss, "batch_accuracy": self.accuracy.compute()})
        return loss


class MultiTask(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 10), nn.GELU())
        self.classify, self.regress = nn.Linear(10, 3), nn.Linear(10, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, label, target = batch
        h = self.trunk(x)
        first, second = F.cross_entropy(self.classify(h), label), F.mse_loss(self.regress(h), target)
        self.log_dict({"class": first, "value": second})
        return first + 0.5 * second


class FrozenBackbone(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 10), nn.GELU()).requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.backbone(batch[0])), batch[1])


class Distillation(Lit):
    """A student and its frozen teacher, under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = mlp(6, 3).requires_grad_(False)
        self.student = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(batch).softmax(-1)
        return F.kl_div(self.student(batch).log_softmax(-1), wanted, reduction="batchmean")


class DictBatch(Criterion):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.criterion(self(batch["image"]), batch["label"])


@dataclass
class Sample:
    features: Tensor
    label: Tensor
    names: list[str]


class DataclassBatch(Criterion):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert len(batch.names) == len(batch.label)
        return self.criterion(self(batch.features), batch.label)


def as_sample(samples: list[Any]) -> Sample:
    features, labels = default_collate(samples)
    return Sample(features, labels, [f"{label}.png" for label in labels.tolist()])


class NestedBatch(Criterion):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (left, right), extra = batch
        assert len(extra["path"]) == len(left)
        return self.criterion(self(torch.cat([left, right], -1)), extra["target"]["label"])


def nested(samples: list[Any]) -> Any:
    x, label = default_collate(samples)
    return (x[:, :2], x[:, 2:]), {"target": {"label": label}, "path": [f"{i}" for i in label.tolist()]}


class Detector(Lit):
    """Images of different sizes in a list, with as many boxes as they happen to have."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.SiLU())
        self.neck = nn.Sequential(nn.Linear(6, 8), nn.SiLU())
        self.tower = nn.Sequential(nn.Linear(8, 8), nn.SiLU())
        self.boxes = nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        pooled = torch.cat([self.backbone(image[None]).mean((2, 3)) for image in images])
        predicted = self.boxes(self.tower(self.neck(pooled)))
        wanted = torch.stack([target["boxes"].mean(0) for target in targets])
        return F.smooth_l1_loss(predicted, wanted)


def detector_loss(module: Any, batch: Any) -> Tensor:
    pooled = torch.cat([module.backbone(image[None]).mean((2, 3)) for image in batch[0]])
    wanted = torch.stack([target["boxes"].mean(0) for target in batch[1]])
    return F.smooth_l1_loss(module.boxes(module.tower(module.neck(pooled))), wanted)


def as_lists(samples: list[Any]) -> Any:
    return [image for image, _ in samples], [{"boxes": boxes} for _, boxes in samples]


class GraphNetwork(Lit):
    """Nodes of all graphs in one tensor, edges in another, and a vector that says which graph a node is of."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor, count: int) -> Tensor:
        h = torch.tanh(self.encode(x))
        for layer in (self.first, self.second):
            h = h + torch.tanh(layer(torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])))
        pooled = torch.zeros(count, h.shape[1]).index_add(0, graph, h)
        return self.head(pooled)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        predicted = self(batch["x"], batch["edges"], batch["graph"], len(batch["y"]))
        return F.cross_entropy(predicted, batch["y"])


def graphs(samples: list[Any]) -> dict[str, Tensor]:
    """A ring of three to five nodes each."""
    sizes = [len(x) for x, _ in samples]
    starts = torch.tensor([0, *sizes]).cumsum(0)
    rings = [torch.stack([torch.arange(n), torch.arange(n).roll(1)]) + start for n, start in zip(sizes, starts)]
    return {
        "x": torch.cat([x for x, _ in samples]),
        "edges": torch.cat(rings, 1),
        "graph": torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)),
        "y": torch.stack([y for _, y in samples]),
    }


class PINN(Lit):
    """The loss differentiates the network by its input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return pinn_loss(self, batch)


def pinn_loss(module: Any, batch: Any) -> Tensor:
    (x,) = batch
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        u = module.net(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    return F.mse_loss(slope + u, torch.zeros_like(u))


class SkipsBatches(Regression):
    """No loss in eval mode: a step that is meant for training only."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return super().training_step(batch, batch_idx) if self.training else None


class DrawsItself(Regression):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return F.mse_loss(self(batch[0]), batch[1])


# ---- the lists ----

IMAGES = rows(drawn(64, 3, 6, 6), whole(4, 64))
IMAGES_VAL = rows(drawn(48, 3, 6, 6, seed=1), whole(4, 48, seed=1))
PIXELS = rows(drawn(64, 1, 4, 4), whole(3, 64, 4, 4))
PIXELS_VAL = rows(drawn(48, 1, 4, 4, seed=1), whole(3, 48, 4, 4, seed=1))
VECTORS, VECTORS_VAL = list(drawn(64, 12)), list(drawn(48, 12, seed=1))
SIXES, SIXES_VAL = list(drawn(64, 6)), list(drawn(48, 6, seed=1))
REGRESSION = rows(drawn(64, 6), drawn(64, 2, seed=2))
REGRESSION_VAL = rows(drawn(48, 6, seed=1), drawn(48, 2, seed=3))
CLASSES = rows(drawn(64, 6), whole(3, 64))
CLASSES_VAL = rows(drawn(48, 6, seed=1), whole(3, 48, seed=1))
VIEWS = rows(drawn(64, 8), drawn(64, 8, seed=2))
VIEWS_VAL = rows(drawn(48, 8, seed=1), drawn(48, 8, seed=3))
TRIPLETS = rows(drawn(64, 8), drawn(64, 8, seed=2), drawn(64, 8, seed=4))
TRIPLETS_VAL = rows(drawn(48, 8, seed=1), drawn(48, 8, seed=3), drawn(48, 8, seed=5))
TOKENS = [{"input_ids": t, "labels": t} for t in whole(11, 64, 6)]
TOKENS_VAL = [{"input_ids": t, "labels": t} for t in whole(11, 48, 6, seed=1)]
SENTENCES = [
    {"input_ids": t, "attention_mask": (torch.arange(6) < n).long(), "labels": y}
    for t, n, y in zip(whole(17, 64, 6), whole(4, 64) + 3, whole(3, 64))
]
SENTENCES_VAL = [
    {"input_ids": t, "attention_mask": (torch.arange(6) < n).long(), "labels": y}
    for t, n, y in zip(whole(17, 48, 6, seed=1), whole(4, 48, seed=1) + 3, whole(3, 48, seed=1))
]
WORDS, WORDS_VAL = rows(whole(9, 64, 5), whole(3, 64)), rows(whole(9, 48, 5, seed=1), whole(3, 48, seed=1))
LIKES = rows(whole(12, 64), whole(15, 64), whole(2, 64).float())
LIKES_VAL = rows(whole(12, 48, seed=1), whole(15, 48, seed=1), whole(2, 48, seed=1).float())
TASKS = rows(drawn(64, 6), whole(3, 64), drawn(64, 2, seed=2))
TASKS_VAL = rows(drawn(48, 6, seed=1), whole(3, 48, seed=1), drawn(48, 2, seed=3))
PICTURES = [(drawn(3, 4 + i % 3, 5, seed=i), drawn(1 + i % 4, 4, seed=i)) for i in range(32)]
PICTURES_VAL = [(drawn(3, 4 + i % 3, 5, seed=i), drawn(1 + i % 4, 4, seed=i)) for i in range(100, 132)]
RINGS = [(drawn(3 + i % 3, 4, seed=i), whole(2, 1, seed=i)[0]) for i in range(32)]
RINGS_VAL = [(drawn(3 + i % 3, 4, seed=i), whole(2, 1, seed=i)[0]) for i in range(100, 132)]
FRAMES = rows(drawn(64, 6, 5), 1 + whole(3, 64, 2))
POINTS, POINTS_VAL = rows(drawn(64, 1)), rows(drawn(48, 1, seed=1))


def without_labels(samples: list[Any]) -> Any:
    """A validation batch that training_step does not take."""
    return default_collate([x for x, _ in samples])


def weighted(module: Any, predicted: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(predicted, label, weight=torch.tensor([1.0, 2.0, 0.5]), label_smoothing=0.1)


def two_losses(module: Any, batch: Any) -> Tensor:
    x, label, target = batch
    h = module.trunk(x)
    return F.cross_entropy(module.classify(h), label) + F.mse_loss(module.regress(h), target) / 2


def classified(module: Any, batch: Any) -> Tensor:
    return weighted(module, module.model(batch[0]), batch[1])


MEASURED: dict[str, Case] = {
    "image classifier": Case(ImageClassifier, IMAGES, IMAGES_VAL, lambda m, b: F.cross_entropy(m(b[0]), b[1])),
    "regression": Case(Regression, REGRESSION, REGRESSION_VAL, regression_loss),
    "segmentation": Case(UNet, PIXELS, PIXELS_VAL, lambda m, b: F.cross_entropy(m(b[0]), b[1])),
    "autoencoder": Case(Autoencoder, VECTORS, VECTORS_VAL, lambda m, b: F.mse_loss(m.decoder(m.encoder(b)), b)),
    "VAE with its own noise": Case(
        VAE,
        VECTORS,
        VECTORS_VAL,
        lambda m, b: sum(w * t for w, t in zip((1, 0.1), m.terms(b))),
        gap=False,
        note="another term written by hand",
    ),
    "GAN with a loss": Case(GAN, SIXES, SIXES_VAL, discriminator_loss, options={"loss": discriminator_loss}),
    "contrastive": Case(SimCLR, VIEWS, VIEWS_VAL, simclr_loss, note="no Gauss-Newton factors"),
    "contrastive, views joined": Case(
        JoinedViews,
        VIEWS,
        VIEWS_VAL,
        lambda m, b: nt_xent(m.projection(m.backbone(torch.cat(b)))),
        note="a perturbation is shared by all 64",
    ),
    "triplet": Case(
        Triplet, TRIPLETS, TRIPLETS_VAL, lambda m, b: F.triplet_margin_loss(*(m.embed(x) for x in b), margin=2.0)
    ),
    "language model with its own loss": Case(LanguageModel, TOKENS, TOKENS_VAL, lambda m, b: m.model(**b).loss),
    "language model, loss in a dict": Case(LossInDict, TOKENS, TOKENS_VAL, lambda m, b: m.model(**b).loss),
    "GPT-2 of transformers": Case(gpt2, TOKENS, TOKENS_VAL, lambda m, b: m.model(**b).loss),
    "BERT of transformers": Case(
        bert,
        SENTENCES,
        SENTENCES_VAL,
        lambda m, b: F.cross_entropy(m.model(b["input_ids"], attention_mask=b["attention_mask"]).logits, b["labels"]),
        collate=encoded,
    ),
    "LSTM": Case(LSTM, WORDS, WORDS_VAL, lambda m, b: F.cross_entropy(m(b[0]), b[1])),
    "embeddings": Case(
        Recommender, LIKES, LIKES_VAL, lambda m, b: F.binary_cross_entropy_with_logits(m(b[0], b[1]), b[2])
    ),
    "two tasks": Case(
        MultiTask,
        TASKS,
        TASKS_VAL,
        two_losses,
    ),
    "frozen backbone": Case(
        FrozenBackbone, CLASSES, CLASSES_VAL, lambda m, b: F.cross_entropy(m.head(m.backbone(b[0])), b[1])
    ),
    "distillation": Case(
        Distillation,
        SIXES,
        SIXES_VAL,
        lambda m, b: F.kl_div(m.student(b).log_softmax(-1), m.teacher(b).detach().softmax(-1), reduction="batchmean"),
    ),
    "dict batch": Case(
        DictBatch,
        [{"image": x, "label": y} for x, y in CLASSES],
        [{"image": x, "label": y} for x, y in CLASSES_VAL],
        lambda m, b: weighted(m, m.model(b["image"]), b["label"]),
    ),
    "dataclass batch": Case(
        DataclassBatch,
        CLASSES,
        CLASSES_VAL,
        lambda m, b: weighted(m, m.model(b.features), b.label),
        collate=as_sample,
    ),
    "nested batch": Case(
        NestedBatch,
        CLASSES,
        CLASSES_VAL,
        lambda m, b: weighted(m, m.model(torch.cat(b[0], -1)), b[1]["target"]["label"]),
        collate=nested,
    ),
    "step returns a dict": Case(ReturnsDict, REGRESSION, REGRESSION_VAL, regression_loss),
    "step takes the batch alone": Case(BatchAlone, REGRESSION, REGRESSION_VAL, regression_loss),
    "step takes anything": Case(AnyArguments, REGRESSION, REGRESSION_VAL, regression_loss),
    "criterion and model": Case(Criterion, CLASSES, CLASSES_VAL, classified),
    "torchmetrics in the step": Case(WithMetrics, CLASSES, CLASSES_VAL, classified),
    "several validation loaders": Case(
        SeveralLoaders, REGRESSION, REGRESSION_VAL, regression_loss, second_val=REGRESSION, val_batch=10, probe=20
    ),
    "validation batch of another kind": Case(
        Regression,
        REGRESSION,
        REGRESSION_VAL,
        regression_loss,
        val_collate=without_labels,
        probe=BATCH,
        of="train",
        warns=("measured on the first training batch, not on a validation batch: RuntimeError: The size of tensor a",),
    ),
    "no validation": Case(Regression, REGRESSION, None, regression_loss, probe=BATCH, of="train"),
    "validation one by one": Case(
        Regression,
        REGRESSION,
        REGRESSION_VAL,
        regression_loss,
        val_batch=1,
        initial=False,
        warns=("not measured before the first step: the sanity check has run on too few validation samples",),
    ),
    "detection": Case(
        Detector,
        PICTURES,
        PICTURES_VAL,
        detector_loss,
        collate=as_lists,
        probe=BATCH,
        options={"nodes": ["neck", "tower"]},
    ),
    "graphs": Case(
        GraphNetwork,
        RINGS,
        RINGS_VAL,
        lambda m, b: F.cross_entropy(m(b["x"], b["edges"], b["graph"], len(b["y"])), b["y"]),
        collate=graphs,
        probe=BATCH,
    ),
    "physics-informed": Case(PINN, POINTS, POINTS_VAL, pinn_loss),
}

DECLINED: dict[str, Declined] = {
    "GAN": Declined(
        GAN, SIXES, "this run is not monitored: training_step of a module with manual optimisation steps its optimizers"
    ),
    "no loss for the batch": Declined(SkipsBatches, REGRESSION, "training_step returned no loss for the probe batch"),
    "step draws its batches": Declined(DrawsItself, REGRESSION, "training_step draws its batches itself"),
}

PARTLY: dict[str, Declined] = {
    "no modules": Declined(
        ParametersAlone, REGRESSION, "pairs of layers are not measured in this run: NoCallError: loss(model, batch) did"
    ),
    "images in a list": Declined(
        Detector, PICTURES, "pairs of layers are not measured in this run: NodeError: no module", collate=as_lists
    ),
}
"""pairs of layers or eigenvalues, but not both"""
