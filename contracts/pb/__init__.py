"""Generated from proto/ by `make proto`. Only codec.py, servicers and clients import it."""
