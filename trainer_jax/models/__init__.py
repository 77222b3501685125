"""Policy models: parameters as a plain pytree, forward passes as pure functions."""
