"""The callback for PyTorch Lightning: hooks, and what only a Trainer knows."""
