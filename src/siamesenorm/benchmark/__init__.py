"""Speed and memory as ratios within one run: boundaries, training steps, and other libraries beside them."""
