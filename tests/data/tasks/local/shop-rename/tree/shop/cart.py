def total(price, count):
    return price + count
