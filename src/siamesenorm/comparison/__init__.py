"""Comparison: sweeps over topologies, norms, learning rates and seeds, and what they show."""
