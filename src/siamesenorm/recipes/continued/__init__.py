"""Continue pre-training a converted model: the recipe, its training and its report."""

from siamesenorm.recipes.continued.experiment import ARMS, Arm, Experiment
from siamesenorm.recipes.continued.findings import Findings, find
from siamesenorm.recipes.continued.report import bases, conclusions, gaps, write_report
from siamesenorm.recipes.continued.results import read_results
from siamesenorm.recipes.continued.training import train_experiment

__all__ = [
    "ARMS",
    "Arm",
    "Experiment",
    "Findings",
    "bases",
    "conclusions",
    "find",
    "gaps",
    "read_results",
    "train_experiment",
    "write_report",
]
