"""Coding tasks: small Python repositories with one fault each, and a scripted expert for them."""

from sampler_fleet.episodes.tasks.generate import generate_tasks

__all__ = ["generate_tasks"]
