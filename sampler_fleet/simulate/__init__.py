"""Days of a fleet in seconds: the real router, registry and autoscaler, simulated samplers."""
