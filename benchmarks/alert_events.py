"""What happens to runs by accident, and what their users do on purpose: name, cause, moment."""

from __future__ import annotations

from benchmarks import alert_data_events as data
from benchmarks import alert_step_events as steps
from benchmarks import alert_weight_events as weights
from benchmarks.alert_event import Event

EVENTS: dict[str, Event] = {
    "learning rate x 20": Event(steps.rate_times(20), "learning rate"),
    "learning rate x 5": Event(steps.rate_times(5), "learning rate"),
    "labels shuffled": Event(data.labels_shuffled, "labels"),
    "class missing": Event(data.class_missing, "class missing"),
    "batch repeated": Event(data.batch_repeated, "repeated data"),
    "inputs rescaled": Event(data.inputs_rescaled, "inputs"),
    "inputs shifted": Event(data.inputs_shifted, "inputs"),
    "inputs inverted": Event(data.inputs_inverted, "inputs"),
    "inputs noisy": Event(data.inputs_noisy, "inputs"),
    "half of a layer zeroed": Event(weights.half_zeroed, "weights zeroed", "end"),
    "layer re-initialized": Event(weights.layer_reinitialized, "weights replaced", "end"),
    "noise on all weights": Event(weights.weights_noisy, "weight noise", "end"),
    "statistics reset and frozen": Event(weights.statistics_frozen, "statistics", "middle"),
    "skip connection cut": Event(weights.skip_cut, "forward pass", "middle"),
    "activation exchanged": Event(weights.activation_exchanged, "forward pass", "middle"),
    "dropout raised": Event(weights.dropout_raised, "dropout"),
    "units dead": Event(weights.units_dead, "dead units", "middle"),
    "outputs saturated": Event(weights.outputs_saturated, "weights grown", "end"),
    "NaN in a weight": Event(weights.not_a_number, "not finite", "middle"),
    "overflow": Event(weights.overflow, "weights grown", "end"),
    "optimizer state damaged": Event(steps.optimizer_state_damaged, "optimizer state", "middle"),
    "ascent": Event(steps.ascent, "gradient sign"),
    "learning rate + 10 % per validation": Event(steps.rate_grows(0.1), "learning rate", is_drift=True),
    "learning rate + 30 % per validation": Event(steps.rate_grows(0.3), "learning rate", is_drift=True),
    "weight decay negative": Event(steps.weight_decay_negative, "weight decay", is_drift=True),
    "layer grows": Event(weights.layer_grows, "weights grown", is_drift=True),
    "inputs decay": Event(data.data_decays, "inputs", is_drift=True),
    "labels decay": Event(data.labels_decay, "labels", is_drift=True),
}
CAUSES = tuple(dict.fromkeys(event.cause for event in EVENTS.values()))
FIRST = ("learning rate x 5", "inputs rescaled", "inputs noisy", "half of a layer zeroed", "optimizer state damaged")
SECOND = ("labels shuffled", "learning rate x 20", "outputs saturated", "layer re-initialized", "ascent")
"""of two events in one run: the first of them leaves something to disturb"""
HAND: dict[str, Event] = {
    "warm restart": Event(steps.warm_restart, "learning rate"),
    "step decay": Event(steps.step_decay, "learning rate"),
    "batch size x 2": Event(steps.batch_times(2), "batch size"),
    "batch size / 4": Event(steps.batch_times(0.25), "batch size"),
    "weight decay x 10": Event(steps.weight_decay_changed, "weight decay"),
    "first half frozen": Event(steps.first_half_frozen, "frozen parameters"),
}
"""no alerts, but notices"""
