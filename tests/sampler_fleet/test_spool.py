"""The trajectory log across restarts, and across a kill -9 in mid-append."""

import asyncio
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from contracts.errors import BadInputError, ConflictError, RetryError
from sampler_fleet.spool import Prompt, Spool
from tests.sampler_fleet.fakes import make_trajectory

ROOT = Path(__file__).parents[2]


async def take(spool: Spool, after: int, num: int):
    groups = []
    async for group in spool.follow(after):
        groups.append(group)
        if len(groups) == num:
            return groups


async def test_groups_come_in_order_and_the_stream_stays_open(tmp_path):
    spool = Spool(tmp_path / "groups.sqlite")
    for name in ("a", "b"):
        await spool.append(name, [make_trajectory(f"{name}/0"), make_trajectory(f"{name}/1")])
    reader = asyncio.create_task(take(spool, 0, 3))
    await asyncio.sleep(0.05)
    assert not reader.done()
    assert await spool.append("c", [make_trajectory("c/0")]) == 3
    groups = await asyncio.wait_for(reader, 5)
    assert [(g.sequence, g.task_id, len(g.trajectories)) for g in groups] == [
        (1, "a", 2),
        (2, "b", 2),
        (3, "c", 1),
    ]
    kept, written = groups[0].trajectories[0], make_trajectory("a/0")
    for field in ("tokens", "loss_mask", "sampler_logp"):
        np.testing.assert_array_equal(getattr(kept, field), getattr(written, field))
    np.testing.assert_array_equal(kept.candidates.ids, written.candidates.ids)
    assert (kept.spans, kept.reward, kept.session_id) == (written.spans, 1.0, "a/0")
    spool.close()


async def test_a_sequence_and_a_prompt_are_never_used_twice(tmp_path):
    spool = Spool(tmp_path / "groups.sqlite")
    await spool.append("a", [make_trajectory("a/0")])
    await spool.append("b", [make_trajectory("b/0")])
    assert [spool.next_prompt() for _ in range(2)] == [Prompt(0, 0), Prompt(1, 0)]
    spool.acknowledge(2)
    assert spool.count() == 0
    spool.close()
    spool = Spool(tmp_path / "groups.sqlite")
    assert (spool.last_sequence, spool.cursor, spool.count()) == (2, 2, 0)
    assert await spool.append("c", [make_trajectory("c/0")]) == 3
    assert [spool.next_prompt().number for _ in range(3)] == [0, 1, 2], "first what was cut off"
    assert [g.task_id for g in await take(spool, 2, 1)] == ["c"]
    spool.close()


async def test_prompts_that_were_cut_off_are_produced_again(tmp_path):
    for num_starts in range(3):
        spool = Spool(tmp_path / "groups.sqlite")
        prompts = [spool.next_prompt() for _ in range(4)]
        assert [prompt.number for prompt in prompts] == [0, 1, 2, 3]
        assert {prompt.num_starts for prompt in prompts} == {num_starts}
        spool.close()
    spool = Spool(tmp_path / "groups.sqlite")
    prompts = [spool.next_prompt() for _ in range(4)]
    await spool.append("t", [make_trajectory("s")], prompts[2])
    spool.drop(prompts[0])
    spool.close()
    spool = Spool(tmp_path / "groups.sqlite")
    assert [spool.next_prompt().number for _ in range(4)] == [1, 3, 4, 5]
    spool.close()


async def test_acknowledging_forgets_up_to_and_with_a_sequence(tmp_path):
    spool = Spool(tmp_path / "groups.sqlite")
    for name in "abc":
        await spool.append(name, [make_trajectory(name)])
    spool.acknowledge(2)
    assert [g.sequence for g in await take(spool, 0, 1)] == [3]
    spool.acknowledge(1)  # an older one changes nothing
    assert spool.count() == 1
    with pytest.raises(BadInputError, match="expected a sequence up to 3, its newest, found 4"):
        spool.acknowledge(4)
    with pytest.raises(BadInputError, match="was the state directory replaced"):
        await take(spool, 500, 1)
    spool.close()


async def test_concurrent_appends_are_all_kept(tmp_path):
    spool = Spool(tmp_path / "groups.sqlite")
    sequences = await asyncio.gather(
        *(spool.append(f"{i}", [make_trajectory(f"{i}")]) for i in range(20))
    )
    assert sorted(sequences) == list(range(1, 21))
    assert spool.last_sequence == 20
    assert [g.sequence for g in await take(spool, 0, 20)] == list(range(1, 21))
    spool.close()


async def test_what_was_appended_survives_kill_9(tmp_path):
    """A process appends and prints each sequence once it is durable; it is killed in the middle."""
    path = tmp_path / "groups.sqlite"
    script = textwrap.dedent(f"""
        import asyncio, pathlib
        from sampler_fleet.spool import Spool
        from tests.sampler_fleet.fakes import make_trajectory

        async def main():
            spool = Spool(pathlib.Path({str(path)!r}))
            while True:
                prompt = spool.next_prompt()
                print(await spool.append("t", [make_trajectory("s")], prompt), flush=True)

        asyncio.run(main())
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    said = [int(process.stdout.readline()) for _ in range(5)]
    process.send_signal(signal.SIGKILL)
    said += [int(line) for line in process.stdout.read().splitlines()]
    process.wait()
    process.stdout.close()
    spool = Spool(path)
    assert spool.last_sequence in (said[-1], said[-1] + 1), "at most the one being reported"
    kept = [g.sequence for g in await take(spool, 0, spool.last_sequence)]
    assert kept == list(range(1, spool.last_sequence + 1))
    prompt = spool.next_prompt()
    assert prompt.number == spool.last_sequence, "every prompt has its group or is left to make"
    assert await spool.append("t", [make_trajectory("s")]) == kept[-1] + 1
    spool.close()


def test_two_gateways_cannot_share_a_log(tmp_path):
    spool = Spool(tmp_path / "groups.sqlite")
    with pytest.raises(ConflictError, match="another gateway"):
        Spool(tmp_path / "groups.sqlite")
    spool.close()
    Spool(tmp_path / "groups.sqlite").close()


def test_a_file_that_is_no_log_is_refused(tmp_path):
    (tmp_path / "groups.sqlite").write_text("something else" * 100)
    with pytest.raises(BadInputError, match="expected a sound SQLite file"):
        Spool(tmp_path / "groups.sqlite")


async def test_a_follower_of_a_log_that_closes_is_told(tmp_path):
    spool = Spool(tmp_path / "groups.sqlite")
    reader = asyncio.create_task(take(spool, 0, 1))
    await asyncio.sleep(0.02)
    spool.stop()
    with pytest.raises(RetryError, match="being closed"):
        await asyncio.wait_for(reader, 5)
    spool.close()


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096 * 2 : 4096 * 4] = b"x" * 4096 * 2
    path.write_bytes(data)


def of_other_tables(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE counters (something TEXT)")
    db.close()


@pytest.mark.parametrize(
    "change",
    [
        damaged,
        of_other_tables,
        lambda path: path.write_text("no database at all, " * 100),
        lambda path: path.write_bytes(path.read_bytes()[:5000]),
    ],
)
async def test_a_damaged_log_is_refused_in_a_sentence(tmp_path, change):
    path = tmp_path / "groups.sqlite"
    spool = Spool(path)
    for index in range(40):
        await spool.append("t", [make_trajectory(f"s{index}")])
        spool.next_prompt()
    spool.close()
    change(path)
    with pytest.raises(BadInputError, match=r"trajectory log .*: expected"):
        spool = Spool(path)
        try:
            await take(spool, 0, 40)
        finally:
            spool.close()
    Spool(tmp_path / "new" / "groups.sqlite").close()


def test_another_runs_log_is_refused(tmp_path):
    path = tmp_path / "groups.sqlite"
    Spool(path, owner="model a").close()
    Spool(path, owner="model a").close()
    with pytest.raises(BadInputError, match="expected one of model b, found one of model a"):
        Spool(path, owner="model b")
    Spool(path, owner="model a").close()
