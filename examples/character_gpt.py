"""Train a small GPT on characters and watch the curvature between its blocks.

    python examples/character_gpt.py [--steps 400] [--out runs/character_gpt]

The text is Python's own documentation as it ships with Python, half a million characters. Attention is torch's
`scaled_dot_product_attention`: its fused kernels cannot be differentiated twice, so curvmon measures with the plain one
and leaves training with whichever is fastest.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from curvmon import CurvatureMonitor


class Passages(Dataset[tuple[Tensor, Tensor]]):
    """Passages of `context` characters, with the character that follows each of them as its target."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        passage = self.text[start : start + self.context + 1]
        return passage[:-1], passage[1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attend(self, x: Tensor) -> Tensor:
        # batch x length x 3 width -> three of batch x heads x length x (width / heads)
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.project(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(pl.LightningModule):
    def __init__(self, characters: int, context: int, width: int = 64, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, text: Tensor) -> Tensor:
        x = self.characters(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: list[Tensor]) -> Tensor:
        text, following = batch
        return F.cross_entropy(self(text).flatten(0, 1), following.flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)

    @torch.no_grad()
    def write(self, beginning: Tensor, length: int) -> Tensor:
        """`beginning` and `length` more characters, each drawn from what the model finds probable."""
        text, context = beginning, len(self.places.weight)
        for _ in range(length):
            logits = self(text[None, -context:])[0, -1]
            text = torch.cat([text, torch.multinomial((logits / 0.7).softmax(0), 1)])
        return text


def main(argv: Sequence[str] | None = None) -> CurvatureMonitor:
    parser = argparse.ArgumentParser(description="A character GPT with a CurvatureMonitor")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=100, help="steps between two validations, and measurements")
    parser.add_argument("--context", type=int, default=64, help="characters that the model sees")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4, help="number of blocks")
    parser.add_argument("--out", type=Path, default=Path("runs/character_gpt"), help="folder for the logs")
    options = parser.parse_args(argv)

    pl.seed_everything(0, verbose=False)
    corpus = "\n".join(topics.values())
    alphabet = sorted(set(corpus))
    index = {character: i for i, character in enumerate(alphabet)}
    text = torch.tensor([index[character] for character in corpus])
    known, unknown = text[: -len(text) // 10], text[-len(text) // 10 :]

    # Nodes are submodules of the LightningModule. A passage makes many predictions, and eight of them a good sample.
    monitor = CurvatureMonitor(nodes=["blocks.*"], eigenvalues=3, probe_size=8)
    tensorboard, table = TensorBoardLogger(options.out, name="tensorboard"), CSVLogger(options.out, name="csv")
    trainer = pl.Trainer(
        max_steps=options.steps,
        val_check_interval=options.every,
        check_val_every_n_epoch=None,  # validations are counted in steps, across epochs
        limit_val_batches=10,
        gradient_clip_val=1.0,
        callbacks=[monitor],
        logger=[tensorboard, table],
        log_every_n_steps=10,
    )
    model = GPT(len(alphabet), options.context, options.width, options.depth)
    trainer.fit(
        model,
        DataLoader(Passages(known, options.context), batch_size=32, shuffle=True),
        DataLoader(Passages(unknown, options.context), batch_size=32),
    )

    written = model.eval().write(torch.tensor([index[character] for character in "The "]), 200)
    print("\nThe model writes:", "".join(alphabet[i] for i in written))
    print(f"\nThe curvature at the end:\n{monitor.history[-1]}\n")
    print("   step   loss    λ_1   error of Gauss-Newton   λ_1 over what AdamW bears (unknown before its first step)")
    for moment in monitor.snapshots:
        if moment.spectrum is not None:
            found = moment.spectrum
            print(f"{moment.step:7d}{moment.loss:7.3f}{found.sharpness:7.1f}", end="")
            print(f"{found.ggn_error:24.3f}{found.stability_ratio:12.2f}")
    print(f"\nCharts and heatmaps: tensorboard --logdir {tensorboard.root_dir}")
    print(f"Every number as a table: {table.log_dir}/metrics.csv")
    return monitor


if __name__ == "__main__":
    main()
