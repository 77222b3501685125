from shop import cart, text


def test_total():
    assert cart.total(3, 4) == 12
    assert cart.total(7, 5) == 35


def test_label():
    assert text.label("tea") == "TEA"
