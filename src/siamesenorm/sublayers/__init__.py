"""Sublayers: attention, MLPs and their adapters. They know nothing about topologies."""
