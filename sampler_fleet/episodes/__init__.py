"""Episodes: the agent loop, chat format, sandboxes, tasks and grading."""
