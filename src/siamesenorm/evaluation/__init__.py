"""Evaluation of finished runs beyond the metrics of their tasks."""
