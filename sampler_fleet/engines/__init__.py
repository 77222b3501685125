"""Engines behind one port (`base.py`): what turns a token buffer into recorded tokens."""
