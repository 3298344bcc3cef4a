"""Six projects as people write them, before they know of curvmon. Each trains for one to two minutes on one core."""

from __future__ import annotations

import inspect
import random
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from curvmon.integrations.lightning.demo.network import digits, prepared
from examples.hugging_face import TextClassifier, passages
from examples.image_classifier import cifar10


class Project(NamedTuple):
    """What is passed to a Trainer, and how."""

    module: pl.LightningModule
    train: Any
    val: Any
    trainer: dict[str, Any]


def images(data: Path | None) -> tuple[TensorDataset, TensorDataset]:
    return prepared(digits() if data is None else cifar10(data))


# ---- a CNN with batch norm and OneCycle ----


class CNN(pl.LightningModule):
    def __init__(self, channels: int, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.features = nn.Sequential(
            self.block(channels, 16), nn.MaxPool2d(2), self.block(16, 32), nn.MaxPool2d(2), self.block(32, 64)
        )
        self.classifier = nn.Sequential(nn.Dropout(0.1), nn.Linear(64, 10))

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y, label_smoothing=0.1)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log_dict({"val_loss": F.cross_entropy(logits, y), "val_acc": (logits.argmax(1) == y).float().mean()})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def cnn(data: Path | None) -> Project:
    train, val = images(data)
    epochs = 24 if data is not None else 150
    loader = DataLoader(train, 64, shuffle=True)
    module = CNN(train.tensors[0].shape[1], epochs * len(loader))
    return Project(module, loader, DataLoader(val, 128), {"max_epochs": epochs})


# ---- a GPT of one's own with dict batches ----


class Characters(Dataset):  # type: ignore[type-arg]
    def __init__(self, text: str, length: int) -> None:
        self.ids, self.length = torch.tensor(list(text.encode("ascii", "replace"))), length

    def __len__(self) -> int:
        return (len(self.ids) - 1) // self.length

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        start = i * self.length
        piece = self.ids[start : start + self.length + 1]
        return {"input_ids": piece[:-1], "labels": piece[1:]}


TEXT = "\n".join(topics.values())
SOURCE = inspect.getsource(inspect) + inspect.getsource(ArgumentParser) + inspect.getsource(random)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(pl.LightningModule):
    def __init__(self, epochs: int, width: int = 96, layers: int = 4, length: int = 64) -> None:
        super().__init__()
        self.epochs = epochs
        self.tok, self.pos = nn.Embedding(128, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return {"loss": loss}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)]


def gpt(data: Path | None) -> Project:
    epochs = 6
    train, val = Characters(TEXT[:160_000], 64), Characters(SOURCE[:20_000], 64)
    options = {"max_epochs": epochs, "val_check_interval": 0.25, "gradient_clip_val": 1.0}
    return Project(GPT(epochs), DataLoader(train, 16, shuffle=True), DataLoader(val, 32), options)


# ---- models of transformers, with random weights ----


def bert(data: Path | None) -> Project:
    from transformers import BertConfig, BertForSequenceClassification

    samples = passages(700)
    random.shuffle(samples)
    config = BertConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=64,
        num_labels=2,
    )
    module = TextClassifier(BertForSequenceClassification(config))
    return Project(
        module, DataLoader(samples[200:], 32, shuffle=True), DataLoader(samples[:200], 64), {"max_epochs": 20}
    )


class LanguageModel(pl.LightningModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.steps = steps
        self.model = GPT2LMHeadModel(
            GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss, prog_bar=True)

    def configure_optimizers(self) -> Any:
        from transformers import get_linear_schedule_with_warmup

        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = get_linear_schedule_with_warmup(optimizer, self.steps // 10, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def gpt2(data: Path | None) -> Project:
    steps = 1600
    train, val = Characters(TEXT[:200_000], 64), Characters(SOURCE[:20_000], 64)
    options = {"max_steps": steps, "val_check_interval": 80, "check_val_every_n_epoch": None}
    return Project(LanguageModel(steps), DataLoader(train, 16, shuffle=True), DataLoader(val, 32), options)


# ---- a U-Net with three losses ----


def shapes(count: int, size: int = 32) -> TensorDataset:
    """Discs and rectangles with noise; their masks."""
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    masks = torch.zeros(count, 1, size, size)
    for i in range(count):
        y, x, r = torch.randint(8, size - 8, (2,)), torch.randint(8, size - 8, (2,)), torch.randint(3, 8, (2,))
        disc = (rows - y[0]) ** 2 + (columns - x[0]) ** 2 <= r[0] ** 2
        box = ((rows - y[1]).abs() <= r[1]) & ((columns - x[1]).abs() <= r[1])
        masks[i, 0] = (disc | box).float()
    return TensorDataset(masks + 0.7 * torch.randn_like(masks), masks)


def convolutions(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.LeakyReLU(0.1),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.LeakyReLU(0.1),
    )


class UNet(pl.LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = convolutions(1, width), convolutions(width, 2 * width)
        self.middle = convolutions(2 * width, 4 * width)
        self.up2, self.up1 = (
            nn.ConvTranspose2d(4 * width, 2 * width, 2, 2),
            nn.ConvTranspose2d(2 * width, width, 2, 2),
        )
        self.merge2, self.merge1 = convolutions(4 * width, 2 * width), convolutions(2 * width, width)
        self.head, self.auxiliary = nn.Conv2d(width, 1, 1), nn.Conv2d(2 * width, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.merge2(torch.cat([self.up2(self.middle(F.max_pool2d(second, 2))), second], 1))
        return self.head(self.merge1(torch.cat([self.up1(x), first], 1))), self.auxiliary(x)

    @staticmethod
    def dice(logits: Tensor, mask: Tensor) -> Tensor:
        p = logits.sigmoid()
        shared = (p * mask).sum((1, 2, 3))
        return (1 - (2 * shared + 1) / (p.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)).mean()

    def losses(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, mask = batch
        logits, coarse = self(x)
        auxiliary = F.binary_cross_entropy_with_logits(coarse, F.avg_pool2d(mask, 2))
        return F.binary_cross_entropy_with_logits(logits, mask), self.dice(logits, mask), auxiliary

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        bce, dice, auxiliary = self.losses(batch)
        self.log_dict({"bce": bce, "dice": dice, "auxiliary": auxiliary}, prog_bar=True)
        return bce + dice + 0.4 * auxiliary

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        bce, dice, _ = self.losses(batch)
        self.log("val_loss", bce + dice)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def unet(data: Path | None) -> Project:
    return Project(UNet(), DataLoader(shapes(1600), 32, shuffle=True), DataLoader(shapes(200), 64), {"max_epochs": 20})


# ---- a ViT in bf16-mixed ----


class ViT(pl.LightningModule):
    def __init__(self, channels: int, size: int, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        patch = size // 8 if size > 8 else 2
        tokens = (size // patch) ** 2
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.pos = nn.Parameter(0.02 * torch.randn(1, tokens + 1, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return self.head(self.norm(self.encoder(x)[:, 0]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_acc", (logits.argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=5e-4, weight_decay=0.05)


def vit(data: Path | None) -> Project:
    train, val = images(data)
    epochs = 16 if data is not None else 100
    options = {"max_epochs": epochs, "precision": "bf16-mixed"}
    module = ViT(train.tensors[0].shape[1], train.tensors[0].shape[-1])
    return Project(module, DataLoader(train, 64, shuffle=True), DataLoader(val, 128), options)


PROJECTS: dict[str, Callable[[Path | None], Project]] = {
    "CNN, batch norm, OneCycle": cnn,
    "own GPT, dict batches": gpt,
    "BERT of transformers": bert,
    "GPT-2 of transformers": gpt2,
    "U-Net, three losses": unet,
    "ViT, bf16-mixed": vit,
}
