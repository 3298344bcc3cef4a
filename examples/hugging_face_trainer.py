"""A GPT-2 with random weights in the Trainer of the transformers library, with one callback more.

    python examples/hugging_face_trainer.py [--epochs 3] [--out runs/hugging_face_trainer]

It learns to write the documentation of Python letter by letter; there is no tokenizer and nothing to download. The
numbers go wherever the Trainer logs, here to TensorBoard. Needs accelerate, as every Trainer does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from curvmon.integrations.transformers import CurvatureCallback

LENGTH = 64


def passages(count: int) -> list[dict[str, Tensor]]:
    text = torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")))
    pieces = text[: count * LENGTH].reshape(count, LENGTH)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main(argv: Sequence[str] | None = None) -> CurvatureCallback:
    parser = argparse.ArgumentParser(description="CurvatureCallback in a transformers.Trainer")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--passages", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("runs/hugging_face_trainer"), help="folder for the logs")
    options = parser.parse_args(argv)

    set_seed(0)
    samples = passages(options.passages)
    train, val = samples[: -len(samples) // 5], samples[-len(samples) // 5 :]
    config = GPT2Config(vocab_size=128, n_positions=LENGTH, n_embd=48, n_layer=3, n_head=4, bos_token_id=0)
    curvature = CurvatureCallback()
    trainer = Trainer(
        GPT2LMHeadModel(config),
        TrainingArguments(
            output_dir=str(options.out),
            num_train_epochs=options.epochs,
            per_device_train_batch_size=32,
            learning_rate=1e-3,
            eval_strategy="epoch",
            logging_steps=10,
            report_to=["tensorboard"],
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=train,
        eval_dataset=val,
        callbacks=[curvature],
    )
    trainer.train()

    print(f"\nThe curvature at the end:\n{curvature.history[-1]}")
    print(f"\nOne page: python -m curvmon report {options.out}")
    return curvature


if __name__ == "__main__":
    main()
