"""Every rule of the source tree finds what breaks it, and nothing in a tree that keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_layout

GOOD = {
    "contracts/types.py": '"""Owns types."""\nimport numpy\n',
    "weight_sync/client.py": '"""Owns the client."""\nfrom contracts.types import A\n',
    "trainer_jax/loop.py": '"""Owns the loop."""\nimport jax\nimport weight_sync.client\n',
    "sampler_fleet/serve.py": '"""Owns serving."""\nfrom weight_sync.client import fetch\n',
    "tools/look.py": '"""Owns looking."""\nimport sampler_fleet.serve\nimport trainer_jax.loop\n',
}
LONG = "".join(f"    x = {n}\n" for n in range(80))


@pytest.fixture
def problems(tmp_path, monkeypatch):
    """What the checker says of GOOD with some files changed."""
    monkeypatch.setattr(check_layout, "ROOT", tmp_path)

    def problems(changes: dict[str, str]) -> list[str]:
        for name, text in (GOOD | changes).items():
            path = Path(tmp_path, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return check_layout.problems()

    return problems


def test_a_good_tree_has_no_problems(problems):
    assert problems({}) == []


@pytest.mark.parametrize(
    ("name", "code", "found"),
    [
        ("trainer_jax/a.py", "import sampler_fleet.serve", ":2: trainer_jax must not import"),
        ("trainer_jax/a.py", "from weight_sync.store import Store", ":2: trainer_jax must not"),
        ("sampler_fleet/a.py", "def f():\n    import trainer_jax", ":3: sampler_fleet must not"),
        ("weight_sync/a.py", "import torch", ":2: weight_sync must not need torch"),
        ("contracts/a.py", "from jax import numpy", ":2: contracts must not need jax"),
        ("trainer_jax/utils.py", "", ":1: utils.py says nothing"),
        ("trainer_jax/a.py", "old_logp = 1", ":2: old_logp: log-probs are"),
        ("tools/a.py", "def f(rollout_log_p): ...", ":2: rollout_log_p: log-probs are"),
        ("tools/a.py", "print(x.token_logprobs)", ":2: token_logprobs: log-probs are"),
        ("tools/a.py", f"def f():\n{LONG}", ":2: f has 81 lines, more than 70"),
        ("tools/a.py", "\n" * 500, ":1: 501 lines, more than 500"),
    ],
)
def test_a_broken_rule_is_found_where_it_is(problems, name, code, found):
    said = problems({name: f'"""Owns a."""\n{code}'})
    assert len(said) == 1
    assert said[0].startswith(name + found)


def test_a_module_without_docstring(problems):
    assert problems({"tools/a.py": "x = 1\n"}) == [
        "tools/a.py:1: no module docstring: what does it own, what must it not do?"
    ]


def test_a_cycle_of_imports(problems):
    ring = {
        f"contracts/{a}.py": f'"""Owns {a}."""\nfrom contracts import {b}\n'
        for a, b in ("ab", "bc", "ca")
    }
    cycle = "contracts.a -> contracts.b -> contracts.c -> contracts.a"
    assert problems(ring) == [f"import cycle: {cycle}"]
    ring["contracts/c.py"] = '"""Owns c."""\ndef f():\n    from contracts import a\n'
    assert problems(ring) == []  # inside a function it is not one


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("weight_sync/a.py", "def f():\n    import torch"),
        ("trainer_jax/a.py", "sampler_logp = trainer_logp = ref_logp = 1"),
        ("tools/a.py", f"def f():  # layout: a table\n{LONG}"),
        ("tools/a.py", f'def f():\n    """\n{LONG}    """'),
        ("tools/a.py", "# layout: one grammar\n" + "\n" * 500),
    ],
)
def test_what_is_allowed(problems, name, code):
    assert problems({name: f'"""Owns a."""\n{code}'}) == []
