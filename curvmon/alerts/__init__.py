"""Abrupt changes and broken rules: features, forecasts, detection, context, and the message."""
