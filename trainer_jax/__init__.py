"""The trainer: one policy in JAX, updated on trajectories it did not sample itself."""
