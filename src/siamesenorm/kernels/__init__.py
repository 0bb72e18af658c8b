"""Fused operators; each names the plain function that it must equal."""
