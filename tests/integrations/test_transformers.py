"""`CurvatureCallback` in `transformers.Trainer`, with random weights: BERT and GPT-2, bit for bit, logs, resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvmon
from tests.helpers.state_differences import differences, flat

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from curvmon.integrations.transformers import CurvatureCallback  # noqa: E402

LENGTH, VOCABULARY, SAMPLES = 12, 32, 64


def bert() -> nn.Module:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=LENGTH, num_labels=3,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, bos_token_id=0)
    )


def samples(model: nn.Module, count: int, seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    labels = tokens if isinstance(model, GPT2LMHeadModel) else torch.randint(3, (count,), generator=generator)
    return [{"input_ids": t, "attention_mask": torch.ones_like(t), "labels": y} for t, y in zip(tokens, labels)]


class Heard(TrainerCallback):  # type: ignore[misc]
    """Stands for what `report_to` names: it comes before the user's callbacks."""

    def __init__(self) -> None:
        self.logs: list[tuple[int, dict[str, float]]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        self.logs.append((state.global_step, dict(logs)))

    def steps(self, key: str) -> list[int]:
        return [step for step, logs in self.logs if key in logs]


def trainer_of(
    folder: Path,
    model: nn.Module,
    callbacks: list[Any],
    kind: type = Trainer,
    optimizers: Any = (None, None),
    **options: Any,
) -> Any:
    arguments = TrainingArguments(
        output_dir=str(folder),
        **{
            "num_train_epochs": 2, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "eval_strategy": "steps",
            "eval_steps": 4, "logging_steps": 2, "save_strategy": "no", "report_to": [], "use_cpu": True,
            "disable_tqdm": True, "seed": 3, **options,
        },
    )  # fmt: skip
    return kind(
        model, arguments, train_dataset=samples(model, SAMPLES, 1), eval_dataset=samples(model, 32, 2),
        callbacks=callbacks, optimizers=optimizers,
    )  # fmt: skip


def state_of(trainer: Any) -> dict[str, Any]:
    own = [entry for entry in trainer.state.log_history if not any("curvmon" in key for key in entry)]
    volatile = ("runtime", "per_second", "flos")
    state: dict[str, Any] = {}
    flat(
        {
            "model": trainer.model.state_dict(),
            "modes": [module.training for module in trainer.model.modules()],
            "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in trainer.model.modules()],
            "optimizer": trainer.optimizer.state_dict(),
            "scheduler": trainer.lr_scheduler.state_dict(),
            "log": [{k: v for k, v in entry.items() if not any(word in k for word in volatile)} for entry in own],
            "random": torch.get_rng_state(),
        },
        "", state, {},
    )  # fmt: skip
    return state


def unlimited(**settings: Any) -> CurvatureCallback:
    return CurvatureCallback(**{"max_overhead": None, **settings})


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("network", [bert, gpt2])
def test_training_is_bit_identical(network: Any, accumulate: int, tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": accumulate, "eval_steps": 4 // accumulate}
    without = trainer_of(tmp_path, network(), [], **options)
    without.train()
    callback = unlimited(pulse=2)
    with_callback = trainer_of(tmp_path, network(), [callback], **options)
    with_callback.train()
    assert differences(state_of(without), state_of(with_callback)) == []
    steps = 2 * SAMPLES // 8 // accumulate
    assert [s.step for s in callback.snapshots if s.is_full] == [0, *range(steps // 4, steps + 1, steps // 4)]
    assert [p.step for p in callback.pulses] == list(range(2, steps + 1, 2))
    assert [snapshot.epoch for snapshot in callback.snapshots] == [0, 0, 1, 1, 2]
    assert all(p.learning_rate > 0 and math.isfinite(p.ratio) for p in callback.pulses)


def test_the_same_numbers_as_in_a_plain_loop(tmp_path: Path) -> None:
    """SGD on the batches that the Trainer has drawn, without dropout."""
    drawn: list[dict[str, Tensor]] = []

    class Drawing(Trainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *further: Any, **given: Any) -> Any:
            drawn.append(dict(inputs))
            return super().training_step(model, inputs, *further, **given)

    callback, model = unlimited(pulse=2, data="train"), undropped()
    trainer_of(tmp_path, model, [callback], Drawing, max_grad_norm=0, optimizers=sgd(model)).train()
    plain = undropped().train()
    monitor = curvmon.Monitor(max_overhead=None, pulse=2, data="train")
    optimizer, scheduler = sgd(plain)
    monitor.attach(plain, optimizer, lambda model, batch: model(**batch).loss, scheduler=scheduler, total_steps=16)
    for step, batch in enumerate(drawn, 1):
        monitor.observe(batch)
        optimizer.zero_grad()
        loss = plain(**batch).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        monitor.step(step, loss)
        if step % 4 == 0:
            monitor.measure(step)
    assert [s.step for s in monitor.snapshots] == [s.step for s in callback.snapshots] == [0, 4, 8, 12, 16]
    for ours, theirs in zip(callback.history, monitor.history):
        assert torch.equal(ours.resonance, theirs.resonance) and torch.equal(ours.coupling, theirs.coupling)
    for mine, other in zip(callback.spectra, monitor.spectra):
        assert torch.equal(mine.eigenvalues, other.eigenvalues) and mine.loss == other.loss
    assert len(callback.pulses) == 8
    assert [(p.step, p.gain, p.curvature) for p in callback.pulses] == [
        (p.step, p.gain, p.curvature) for p in monitor.pulses
    ]


def undropped() -> nn.Module:
    model = bert()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def sgd(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.5)


def test_logs_go_where_the_trainer_logs(tmp_path: Path) -> None:
    heard, callback = Heard(), unlimited(pulse=2)
    trainer = trainer_of(tmp_path, bert(), [heard, callback])
    trainer.train()
    assert heard.steps("curvmon/lambda_1") == [0, 4, 8, 12, 16]
    assert heard.steps("curvmon/step_ratio")
    # what the Trainer logs at the steps of pulses is not lost
    assert heard.steps("loss") == list(range(2, 17, 2))
    history = [entry["step"] for entry in trainer.state.log_history if "curvmon/lambda_1" in entry]
    assert history == [0, 4, 8, 12, 16]
    assert curvmon.load_history(tmp_path).snapshots[-1].step == 16


def test_without_evaluation_after_every_epoch(tmp_path: Path) -> None:
    callback = unlimited(pulse=False)
    trainer_of(tmp_path, bert(), [callback], eval_strategy="no").train()
    assert [snapshot.step for snapshot in callback.snapshots] == [0, 8, 16]


def test_validation_batches_where_an_evaluation_comes_first(tmp_path: Path) -> None:
    callback = unlimited(pulse=False)
    trainer_of(tmp_path, bert(), [callback], eval_on_start=True).train()
    assert [snapshot.step for snapshot in callback.snapshots] == [0, 4, 8, 12, 16]
    assert not any("training batch" in note for note in callback.history[0].notes)


def test_resume(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 8}
    whole = unlimited(pulse=2)
    expected = trainer_of(tmp_path / "a", bert(), [whole], **options)
    expected.train()
    resumed = unlimited(pulse=2)
    # in another folder, which has no checkpoints of its own
    trainer = trainer_of(tmp_path / "b", bert(), [resumed], **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-8"))
    assert [s.step for s in resumed.snapshots] == [s.step for s in whole.snapshots] == [0, 4, 8, 12, 16]
    assert [p.step for p in resumed.pulses] == [p.step for p in whole.pulses]
    assert torch.equal(resumed.spectra[-1].eigenvalues, whole.spectra[-1].eigenvalues)
    # what was read back from JSON has its keys in another order
    changed = differences(state_of(expected), state_of(trainer))
    assert [key for key in changed if not key.startswith("['log']")] == []
    assert curvmon.load_history(tmp_path / "a" / "checkpoint-8" / "curvmon.pt").snapshots[-1].step == 8


@pytest.mark.parametrize("action", ["stop", "checkpoint"])
def test_an_alert_stops_or_saves(action: str, tmp_path: Path) -> None:
    class Break(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 6:
                with torch.no_grad():
                    given["model"].bert.pooler.dense.weight[0] = math.nan

    callback = unlimited(pulse=False, on_alert=action)
    trainer = trainer_of(tmp_path, bert(), [Break(), callback])
    with pytest.warns(UserWarning, match="not measured: parameter"):
        trainer.train()
    assert [(alert.kind, alert.step) for alert in callback.alerts] == [("not_finite", 8)]
    assert trainer.state.global_step == (8 if action == "stop" else 16)
    assert (tmp_path / "checkpoint-8" / "curvmon.pt").exists() == (action == "checkpoint")


def test_runs_that_cannot_be_monitored(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, bert(), [CurvatureCallback(strict=True)], label_smoothing_factor=0.1)
    with pytest.raises(curvmon.CurvmonError, match="label_smoothing_factor"):
        trainer.train()
    with pytest.raises(curvmon.NodeError):
        trainer_of(tmp_path, bert(), [CurvatureCallback(nodes=["nowhere"])]).train()


def test_a_trainer_that_computes_the_loss_itself(tmp_path: Path) -> None:
    class OwnLoss(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = nn.functional.cross_entropy(outputs.logits, labels)
            return (loss, outputs) if return_outputs else loss

    callback = CurvatureCallback(pulse=False)
    with pytest.warns(UserWarning, match="the model returned no loss"):
        trainer_of(tmp_path, bert(), [callback], OwnLoss).train()
    assert [s.step for s in callback.snapshots] == [0, 4, 8, 12, 16] and not callback.history
