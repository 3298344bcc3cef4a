"""Curvature of a torch model. Knows no Trainer."""
