"""Real sandboxes for the tests of this folder, and a small task."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from contracts.errors import BadInputError
from sampler_fleet.episodes.base import Task
from sampler_fleet.episodes.grading import Grader, GradingLimits
from sampler_fleet.episodes.sandbox import Host, SandboxLimits, SandboxPool, find_host

LIMITS = SandboxLimits(
    memory_bytes=256 << 20,
    disk_bytes=8 << 20,
    num_processes=32,
    cpu_seconds=10,
    output_bytes=4 << 20,
    tree_bytes=1 << 20,
)


@pytest.fixture(scope="session")
def tokenizer_files() -> Path:
    """The demo's tokenizer. tests/examples holds it against the code that writes it."""
    return Path(__file__).parents[3] / "examples" / "demo-checkpoint"


@pytest.fixture(scope="session")
def host() -> Host:
    try:
        return find_host()
    except BadInputError as error:
        pytest.skip(f"no sandboxes on this machine: {error}")


@pytest.fixture
async def pool(host: Host) -> AsyncIterator[SandboxPool]:
    pool = SandboxPool(4, LIMITS, host=host)
    yield pool
    await pool.close()


@pytest.fixture
def grader(pool: SandboxPool) -> Grader:
    return Grader(pool, GradingLimits(seconds=5))


@pytest.fixture
def task() -> Task:
    hidden = """
from shop import cart, text

def test_product():
    assert cart.total(3, 4) == 12
    assert cart.total(7, 5) == 35

def test_label():
    assert text.label("tea") == "TEA"
"""
    return Task(
        task_id="shop-1",
        split="train",
        template="total",
        issue="shop.cart.total(2, 5) returned 7, expected 10.",
        tree={
            "README.md": "A shop.\n",
            "shop/__init__.py": "",
            "shop/cart.py": "def total(price, count):\n    return price + count\n",
            "shop/text.py": "def label(word):\n    return word.upper()\n",
            "tests/test_cart.py": "from shop import text\nassert text.label('a') == 'A'\n",
        },
        hidden_tests={"tests/test_hidden.py": hidden},
        fail_to_pass=("tests/test_hidden.py::test_product",),
        pass_to_pass=("tests/test_hidden.py::test_label",),
        fix={"shop/cart.py": "def total(price, count):\n    return price * count\n"},
    )
