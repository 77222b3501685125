"""The mismatch report: recorded trajectories beside a checkpoint, and what is wrong with them."""
