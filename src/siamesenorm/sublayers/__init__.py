"""Sublayers: attention, MLPs and their adapters. They do not depend on topologies."""
