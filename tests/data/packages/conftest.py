"""Tests below belong to packages that are data, not to the project."""

collect_ignore_glob = ["*"]
