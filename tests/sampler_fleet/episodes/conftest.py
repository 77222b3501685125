"""Real sandboxes for the tests of this folder, a small task, and stand-ins for containers."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from importlib import util
from pathlib import Path

import pytest

from contracts.errors import BadInputError
from sampler_fleet.episodes.base import Task
from sampler_fleet.episodes.containers.grading import GraderByTask
from sampler_fleet.episodes.containers.launch import SandboxConfig
from sampler_fleet.episodes.containers.pool import ContainerPool
from sampler_fleet.episodes.grading import Grader, GradingLimits
from sampler_fleet.episodes.sandbox import Host, SandboxLimits, SandboxPool, find_host
from tests.sampler_fleet.episodes import fake_docker, image_tasks

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


@pytest.fixture
def docker(tmp_path, monkeypatch, host) -> Path:
    """A stand-in for docker with one empty image, `base`; the directory of its state."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "docker"
    program.write_text(fake_docker.PROGRAM)
    program.chmod(0o755)
    state = tmp_path / "state"
    (state / "base.image").mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_DOCKER", str(state))
    return state


@pytest.fixture
def image(docker) -> Path:
    """A repository, and an /opt as the images of SWE-bench have it: conda with `testbed`."""
    for path, text in image_tasks.TREE.items():
        file = docker / "base.image" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    conda = docker / "base.opt" / "miniconda3"
    packages = conda / "envs" / "testbed" / "lib" / "python3.11" / "site-packages"
    binaries = conda / "envs" / "testbed" / "bin"
    packages.mkdir(parents=True)
    binaries.mkdir()
    (conda / "bin").mkdir()
    (conda / "bin" / "activate").write_text(
        'conda() { export PATH="/opt/miniconda3/envs/$2/bin:$PATH"; }\n'
    )
    (binaries.parent / "pyvenv.cfg").write_text("home = /usr/bin\n")
    for name in ("python", "python3"):
        (binaries / name).symlink_to("/usr/bin/python3")
    program = binaries / "pytest"
    program.write_text(
        "#!/opt/miniconda3/envs/testbed/bin/python\nimport pytest, sys\nsys.exit(pytest.main())\n"
    )
    program.chmod(0o755)
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py"):
        spec = util.find_spec(name)
        assert spec
        assert spec.origin
        found = Path(spec.origin)
        if found.name == "__init__.py":
            unwanted = shutil.ignore_patterns("__pycache__")
            shutil.copytree(found.parent, packages / name, ignore=unwanted)
        else:
            shutil.copy(found, packages)
    return docker


@pytest.fixture
async def image_grader(image):
    pool = ContainerPool(SandboxConfig(runtime="docker", containers=image_tasks.LIMITS), 2)
    yield GraderByTask(None, containers=pool)
    await pool.close()
