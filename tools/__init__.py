"""Command-line tools. They hold no logic that a package owns."""
