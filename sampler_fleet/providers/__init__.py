"""Where samplers run: the port that the autoscaler resizes them through, and its adapters."""
