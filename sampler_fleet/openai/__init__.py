"""The gateway as an OpenAI-compatible server: existing agents make trajectories to train on."""
