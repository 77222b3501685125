"""Sandboxes in container images: Docker, Podman and Modal, and the grading of tasks there."""
