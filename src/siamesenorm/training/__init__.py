"""Training: the loop, its optimizer and schedule, its record, and the verdict on a run."""
