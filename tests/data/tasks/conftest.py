"""Tests below are data of tasks, not tests of the project."""

collect_ignore_glob = ["*"]
