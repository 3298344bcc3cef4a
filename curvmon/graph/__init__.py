"""From a model to a differentiable graph: nodes, taps, the output, the curvature of the loss, efficient operations."""
