"""A run directory with recorded updates, for tests of `tools.episodes`.

The episodes are written by hand in the demo's chat format; probabilities are made up.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from contracts.runfile import write_resolved
from contracts.types import CandidateSets, Ending, Trajectory, TrajectoryGroup, VersionSpan
from sampler_fleet.episodes.chat import ChatFormat
from trainer_jax.recorded import RecordedUpdate, TrainedTokens, write_recorded

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo-checkpoint"
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
GROUPS = {"h200-bf16": 0.02, "b300-nvfp4": 0.5, "l40-fp8": 0.15}  # noise of the log-probs
LOW, HIGH = 0.5, 2.0
REPLIES = ("cat -n shop/cart.py", "sed -i '3s/-/+/' shop/cart.py")


def make_episode(
    name: str,
    group: str,
    *,
    reward: float | None = 1.0,
    ending: Ending = Ending.SUBMITTED,
    replies: tuple[str, ...] = REPLIES,
    version: int = 3,
    hostile: int | None = None,
) -> Trajectory:
    """Replies with observations between. `hostile` is a token id that takes one token's place."""
    chat = ChatFormat.load(DEMO)
    rng = np.random.default_rng(sum(map(ord, name)))
    parts = [(chat.start("You fix bugs.", "The sum of 1 and 2 is 4"), False)]
    for reply in replies:
        parts += [(chat.reply(reply), True), (chat.observe("     1\tdef total(cart):"), False)]
    parts.pop()
    tokens = np.concatenate([ids for ids, _ in parts]).astype(np.int32)
    mask = np.concatenate([np.full(len(ids), sampled) for ids, sampled in parts])
    if hostile is not None:
        tokens[np.flatnonzero(mask)[2]] = hostile
    num = int(mask.sum())
    counts = rng.choice([1, 2, 4, 24], num, p=[0.4, 0.3, 0.2, 0.1])
    ids, logp, own = [], [], []
    for count, token in zip(counts, tokens[mask], strict=True):
        others = rng.permutation(np.setdiff1d(np.arange(800), [token]))[: count - 1]
        q = np.sort(rng.dirichlet(np.full(count, 0.4)) + 1e-6)[::-1]
        place = 0 if rng.random() < 0.8 else count - 1
        ids.append(np.insert(others, place, token))
        logp.append(np.log(q / q.sum()))
        own.append(logp[-1][place])
    edges = np.flatnonzero(np.diff(np.r_[0, mask.astype(int), 0]))
    spans = []
    for number, (start, end) in enumerate(zip(edges[::2], edges[1::2], strict=True)):
        middle = int(start + end) // 2 if number == 0 else int(start)
        spans += [(version, int(start), middle), (version + 1, middle, int(end))]
    return Trajectory(
        task_id=f"<b>task</b> {name}",
        session_id=f"session/{name}",
        group=group,
        sampler_ids=(f"{group}-0",),
        tokens=tokens,
        loss_mask=mask,
        sampler_logp=np.array(own, np.float32),
        candidates=CandidateSets.from_counts(
            counts, np.concatenate(ids).astype(np.int32), np.concatenate(logp).astype(np.float32)
        ),
        spans=tuple(VersionSpan(version=v, start=s, end=e) for v, s, e in spans if e > s),
        reward=reward,
        ending=ending,
        failure="sandbox gone" if ending == Ending.FAILURE else "",
        num_turns=len(replies),
        num_format_errors=3 if ending == Ending.FORMAT_ERRORS else 0,
        seconds=1.5,
    )


def trained_of(t: Trajectory) -> TrainedTokens | None:
    """Log-ratios with the noise of the group; outside the band is masked."""
    if t.reward is None:
        return None
    noise = np.random.default_rng(len(t.tokens)).normal(0, GROUPS[t.group], len(t.sampler_logp))
    noise[3] = -1.5  # one is masked for certain
    trainer_logp = np.minimum(t.sampler_logp + noise, 0).astype(np.float32)
    ratio = np.exp(trainer_logp - t.sampler_logp)
    return TrainedTokens(trainer_logp=trainer_logp, masked=(ratio < LOW) | (ratio > HIGH))


def update_of(step: int, version: int, *prompts: list[Trajectory]) -> RecordedUpdate:
    groups = tuple(
        TrajectoryGroup(
            sequence=10 * step + n, task_id=prompt[0].task_id, trajectories=tuple(prompt)
        )
        for n, prompt in enumerate(prompts)
    )
    trained = tuple(trained_of(t) for prompt in prompts for t in prompt)
    return RecordedUpdate(step=step, version=version, groups=groups, trained=trained)


def make_run(directory: Path) -> Path:
    """A run with two recorded updates of four and three episodes."""
    run, checkpoint = directory / "run", directory / "checkpoint"
    shutil.copytree(DEMO, checkpoint, ignore=shutil.ignore_patterns("*.safetensors"))
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokenizer.add_tokens([HOSTILE])
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    run.mkdir()
    fleet = [
        {"name": name, "weight_format": "bf16", "accelerator": name.split("-")[0]}
        for name in GROUPS
    ]
    write_resolved(
        run / "config.json",
        {
            "run": {"name": "tiny"},
            "model": {"checkpoint": str(checkpoint)},
            "fleet": {"groups": fleet},
        },
    )
    bf16, fp4, fp8 = GROUPS
    write_recorded(
        run,
        update_of(
            1,
            4,
            [make_episode("a0", bf16), make_episode("a1", fp4, reward=0.0)],
            [make_episode("b0", fp4), make_episode("b1", fp8, reward=None, ending=Ending.FAILURE)],
        ),
    )
    loop = ("ls",) * 3
    write_recorded(
        run,
        update_of(
            8,
            11,
            [
                make_episode("c0", fp8, hostile=tokenizer.token_to_id(HOSTILE), version=10),
                make_episode(
                    "c1", fp4, reward=0.0, ending=Ending.FORMAT_ERRORS, replies=loop, version=10
                ),
                make_episode("c2", fp8, reward=0.0, ending=Ending.TURN_LIMIT, version=9),
            ],
        ),
    )
    return run
