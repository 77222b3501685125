"""Amounts as people write them."""


def parse_amount(text):
    """Cents of an amount such as "12.50" or "-3"."""
    text = text.strip()
    sign = 1
    if text.startswith("-"):
        sign = -1
        text = text[1:]
    whole, _, cents = text.partition(".")
    # "1.5" is one and fifty cents
    return sign * (int(whole or "0") * 100 + int(cents.ljust(2, "0")[:2]))


def describe(amount, currency="EUR"):
    sign = "-" if amount < 0 else ""
    whole, cents = abs(amount) // 100, abs(amount) % 100
    return sign + str(whole) + "." + str(cents).zfill(2) + " " + currency


def never_tested(amount):
    return amount + 1
