"""Training loops that curvmon plugs into."""
