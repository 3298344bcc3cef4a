"""Leave no trace: model state, random generators, Trainer state, and every name that is patched in torch."""
