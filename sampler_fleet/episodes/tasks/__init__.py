"""Coding tasks: generated, from sources of many formats, chosen, checked; a scripted expert."""
