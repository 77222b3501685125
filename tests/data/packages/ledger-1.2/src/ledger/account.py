"""Money that comes and goes."""


class OverdrawnError(ValueError):
    """There is less than was asked for."""


class Account:
    def __init__(self, balance=0, limit=0):
        self.balance = balance
        self.limit = limit  # how far below zero it may go
        self.entries = []

    def put(self, amount):
        if amount <= 0:
            raise ValueError("an amount is above 0")
        self.balance += amount
        self.entries.append(amount)

    def take(self, amount):
        """Takes money out; OverdrawnError if there is too little."""
        if self.balance - amount < -self.limit:
            raise OverdrawnError(f"{amount} is too much")
        self.balance -= amount
        self.entries.append(-amount)

    def last(self, num=3):
        """The newest entries, newest first."""
        return self.entries[::-1][:num]
