"""Tasks from real packages: one mutation of a package's source each, shown up by its own tests."""
