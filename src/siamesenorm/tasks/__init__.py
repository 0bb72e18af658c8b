"""Tasks: what a run trains, on which data, and how the result is evaluated."""
