"""The report of a sweep: what its runs came to, beside what the published run came to."""
