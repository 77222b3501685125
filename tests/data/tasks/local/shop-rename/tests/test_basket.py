from shop import basket


class TestTotal:
    def test_product(self):
        assert basket.total(3, 4) == 12
