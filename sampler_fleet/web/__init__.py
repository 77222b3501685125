"""What the gateway and a sampler serve over HTTP: a live page, JSON, metrics.

`server.py` listens, `app.py` answers for the gateway, `page.py` puts the page together. Reading
needs no token; whatever changes something needs one.
"""
