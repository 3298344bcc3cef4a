"""A model of the transformers library under Lightning, with the loss that it computes itself.

    python examples/hugging_face.py [--epochs 3] [--out runs/hugging_face]

A small BERT with random weights reads 64 letters and says whether they are documentation or source code of Python;
there is no tokenizer and nothing to download. curvmon is told nothing: it finds the encoder's layers, and the logits
behind the model's own loss.

For a pretrained model of one's own, `BertForSequenceClassification.from_pretrained(...)` and its tokenizer take the
place of `small_bert` and `passages`; the rest stays.
"""

from __future__ import annotations

import argparse
import inspect
import random
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

from curvmon import CurvatureMonitor

LENGTH = 64
KINDS = {
    "documentation": "\n".join(topics.values()),
    "source code": inspect.getsource(argparse) + inspect.getsource(inspect),
}


def passages(count: int) -> list[dict[str, Tensor]]:
    """Samples as a tokenizer makes them: input_ids, attention_mask, and the labels beside."""
    samples = []
    for label, text in enumerate(KINDS.values()):
        for i in range(count):
            length = LENGTH - i % 16  # the shorter ones are padded
            letters = torch.tensor(list(text.encode("ascii", "replace")[i * LENGTH : i * LENGTH + length]))
            padding = (0, LENGTH - length)
            samples.append(
                {
                    "input_ids": F.pad(letters, padding),
                    "attention_mask": F.pad(torch.ones_like(letters), padding),
                    "labels": torch.tensor(label),
                }
            )
    return samples


def small_bert(layers: int) -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=128,
        hidden_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=LENGTH,
        num_labels=len(KINDS),
    )
    return BertForSequenceClassification(config)


class TextClassifier(pl.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        found: Any = self.model(**batch)
        self.log("val_loss", found.loss, prog_bar=True)
        self.log("val_accuracy", (found.logits.argmax(1) == batch["labels"]).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(argv: Sequence[str] | None = None) -> CurvatureMonitor:
    parser = argparse.ArgumentParser(description="A transformers model with a CurvatureMonitor")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--passages", type=int, default=700, help="of either kind")
    parser.add_argument("--out", type=Path, default=Path("runs/hugging_face"), help="folder for the logs")
    options = parser.parse_args(argv)

    pl.seed_everything(0, verbose=False)
    samples = passages(options.passages)
    random.shuffle(samples)
    train, val = samples[: -len(samples) // 5], samples[-len(samples) // 5 :]
    monitor = CurvatureMonitor()
    tensorboard, table = TensorBoardLogger(options.out, name="tensorboard"), CSVLogger(options.out, name="csv")
    trainer = pl.Trainer(
        max_epochs=options.epochs, callbacks=[monitor], logger=[tensorboard, table], log_every_n_steps=10
    )
    trainer.fit(
        TextClassifier(small_bert(options.layers)),
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(val, batch_size=64),
    )

    accuracy = trainer.callback_metrics["val_accuracy"]
    print(f"\nAccuracy {accuracy:.3f}. The curvature at the end:\n{monitor.history[-1]}")
    print(f"\nCharts and heatmaps: tensorboard --logdir {tensorboard.root_dir}")
    print(f"Every number as a table: {table.log_dir}/metrics.csv")
    return monitor


if __name__ == "__main__":
    main()
