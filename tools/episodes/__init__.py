"""A run's recorded episodes: a page to read them token by token, and their anatomy in numbers."""
