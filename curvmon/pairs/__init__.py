"""Resonance, coupling, stable rank and GN-Gap of all pairs of layers, exactly or from random probes."""
