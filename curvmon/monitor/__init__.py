"""Measuring during training, in any loop: when, on which batch, and what happens if it fails."""
