"""Accounts in a few lines."""

from ledger.account import Account, OverdrawnError
from ledger.text import describe, parse_amount

__all__ = ["Account", "OverdrawnError", "describe", "parse_amount"]
__version__ = "1.2"
