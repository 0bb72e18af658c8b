"""Speed and memory as ratios within one run: boundaries, norms, training steps, and all of them on a GPU."""
