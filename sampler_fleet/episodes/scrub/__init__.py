"""The leak scrub: a task's working tree without what gives its answer away, and the proof."""
