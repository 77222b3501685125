"""The trainer's sections of a run file, and the whole run they describe.

Owns the models of [run], [model], [mesh], [optimizer], [train] and [evaluation], the optimizer
built from its section, and the one loader. The other components' sections are carried along
unread: `trainer_jax.plan` asks their owners to check them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import optax
from pydantic import Field, model_validator

from contracts.errors import BadInputError
from contracts.runfile import Section, read_resolved, read_run_file, validate_section
from trainer_jax.cluster import ClusterSection
from trainer_jax.collapse import CollapseLimits
from trainer_jax.loss_config import LossConfig
from trainer_jax.models.config import ComputeConfig
from trainer_jax.models.parameters import decays
from trainer_jax.sft import SftConfig


class RunSection(Section):
    """[run]: identity, place, and the services it uses.

    Without `gateway` and `weights` addresses the run starts its own on this machine.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    directory: Path | None = None  # default runs/<name>
    seed: int = Field(default=0, ge=0)
    gateway: str | None = None  # host:port
    weights: str | None = None  # host:port
    token_file: Path | None = None  # bearer token of both
    compress: bool = False  # trajectories on their way here, by zstd: for a slow network
    tls_ca: Path | None = None  # verifies both; without it nothing is encrypted
    tls_cert: Path | None = None  # of the trainer, where they ask for one
    tls_key: Path | None = None

    @model_validator(mode="after")
    def _both_addresses(self) -> RunSection:
        if (self.gateway is None) != (self.weights is None):
            raise ValueError("both gateway and weights addresses, or neither")
        if self.gateway is None and (self.tls_ca or self.tls_cert or self.tls_key):
            raise ValueError("tls_ca, tls_cert and tls_key only with gateway and weights")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("both tls_cert and tls_key, or neither")
        if self.tls_cert and not self.tls_ca:
            raise ValueError("tls_ca with tls_cert")
        return self

    @property
    def path(self) -> Path:
        return self.directory or Path("runs") / self.name


class ModelSection(Section):
    """[model]: the Hugging Face directory to start from, and how it is computed."""

    checkpoint: Path
    compute: ComputeConfig = ComputeConfig(round_weights=True)


class MeshSection(Section):
    """[mesh]: devices along each axis; their product is the number of devices used."""

    data: int = Field(default=1, ge=1)
    fsdp: int = Field(default=1, ge=1)
    expert: int = Field(default=1, ge=1)
    tensor: int = Field(default=1, ge=1)
    context: int = Field(default=1, ge=1)


Decay = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class OptimizerSection(Section):
    """[optimizer]: how parameters move, and in what precision they are kept.

    The learning rate rises linearly over `warmup` updates to `lr`, and then stays (constant) or
    falls over `decay` updates to `final_lr` (linear, cosine). `masters` in bfloat16 halve the
    memory of parameters: an update is computed in float32 and rounded up or down at random, so that
    steps far below a unit in the last place still count on average.
    """

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    betas: tuple[Decay, Decay] = (0.9, 0.98)
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)  # of matrices alone
    clip: float | None = Field(default=1.0, gt=0, allow_inf_nan=False)  # global gradient norm
    warmup: int = Field(default=0, ge=0)  # updates
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    decay: int = Field(default=0, ge=0)  # updates
    final_lr: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    freeze_router: bool = False
    masters: Literal["float32", "bfloat16"] = "float32"

    @model_validator(mode="after")
    def _decays(self) -> OptimizerSection:
        if (self.schedule == "constant") != (self.decay == 0):
            raise ValueError("decay in updates with a schedule that falls, and only with one")
        if self.final_lr > self.lr:
            raise ValueError("final_lr <= lr")
        return self

    def learning_rate(self) -> optax.Schedule:
        """By the number of updates made before."""
        warmup = optax.linear_schedule(self.lr / (self.warmup + 1), self.lr, self.warmup)
        if self.schedule == "constant":
            return warmup
        if self.schedule == "linear":
            after = optax.linear_schedule(self.lr, self.final_lr, self.decay)
        else:
            after = optax.cosine_decay_schedule(self.lr, self.decay, self.final_lr / self.lr)
        return optax.join_schedules([warmup, after], [self.warmup])

    def build(self) -> optax.GradientTransformation:
        """The optimizer; its state depends on the section only through its kind."""
        schedule = self.learning_rate()
        if self.name == "adamw":
            first, second = self.betas
            rule = optax.adamw(
                schedule,
                b1=first,
                b2=second,
                eps=self.eps,
                weight_decay=self.weight_decay,
                mask=decays,
            )
        else:
            decay = optax.add_decayed_weights(self.weight_decay, mask=decays)
            rule = optax.chain(decay, optax.sgd(schedule))
        if self.clip:
            rule = optax.chain(optax.clip_by_global_norm(self.clip), rule)
        return _with_standard_promotion(rule)


def _with_standard_promotion(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Optax raises float ** int arrays, which JAX's strict dtype promotion refuses."""

    def update(updates, state, params=None):
        with jax.numpy_dtype_promotion("standard"):
            return rule.update(updates, state, params)

    return optax.GradientTransformation(rule.init, update)


class TrainSection(Section):
    """[train]: how much, in which portions, and how often it is saved."""

    updates: int = Field(gt=0)
    prompts_per_update: int = Field(default=8, gt=0)  # trajectory groups
    row_tokens: int = Field(default=2048, gt=0)  # length of a packed row
    micro_rows: int = Field(default=4, gt=0)  # rows computed at once
    candidate_buckets: tuple[int, ...] = (8, 64)  # widths candidate sets are padded to
    staleness_limit: int | None = Field(default=None, ge=0)  # versions; 0 is synchronous
    checkpoint_every: int = Field(default=10, gt=0)  # updates
    keep_checkpoints: int = Field(default=2, gt=0)
    record_every: int = Field(default=0, ge=0)  # updates; 0: trajectories are not kept
    record_groups: int = Field(default=2, gt=0)  # of a recorded update, the first
    collapse: CollapseLimits = CollapseLimits()
    stop_on_collapse: bool = False
    collapse_updates: int = Field(default=0, ge=0)  # more after a collapse, to see what comes

    @model_validator(mode="after")
    def _buckets_grow(self) -> TrainSection:
        widths = self.candidate_buckets
        if not widths or widths[0] < 1 or list(widths) != sorted(set(widths)):
            raise ValueError("candidate_buckets that grow, the first at least 1")
        return self


class EvaluationSection(Section):
    """[evaluation]: held-out tasks in BF16 over the full vocabulary, before and after."""

    before: bool = True
    after: bool = True
    num_tasks: int = Field(default=32, ge=0)  # 0: all held-out tasks
    num_samples: int = Field(default=4, ge=1)  # per task; pass@4 needs at least 4
    temperature: float = Field(default=1.0, gt=0)
    max_new_tokens: int = Field(default=128, ge=1)  # per turn
    max_reruns: int = Field(default=3, ge=0)  # of samples lost to the infrastructure
    seed: int = Field(default=0, ge=0)


OWN_SECTIONS: dict[str, type[Section]] = {
    "run": RunSection,
    "model": ModelSection,
    "mesh": MeshSection,
    "cluster": ClusterSection,
    "optimizer": OptimizerSection,
    "loss": LossConfig,
    "train": TrainSection,
    "evaluation": EvaluationSection,
}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A validated run. `sections` holds all sections as JSON values, the trainer's resolved."""

    run: RunSection
    model: ModelSection
    mesh: MeshSection
    cluster: ClusterSection
    optimizer: OptimizerSection
    loss: LossConfig
    train: TrainSection
    evaluation: EvaluationSection
    sections: dict[str, dict[str, Any]]

    @property
    def is_local(self) -> bool:
        """Whether the run starts its own services."""
        return self.run.gateway is None

    @property
    def replays_routing(self) -> bool:
        """Whether the samplers say where they routed tokens, for the trainer to do likewise."""
        return self.sections.get("sampling", {}).get("return_routed_experts", False)

    def with_sections(self, sections: dict[str, dict[str, Any]]) -> RunConfig:
        """The same run with the other components' sections as they resolved them."""
        return replace(self, sections=sections)


def parse_run(data: dict[str, dict[str, Any]]) -> RunConfig:
    """Validates the trainer's sections of a run file or run record.

    Raises:
        BadInputError: the first thing wrong, in one sentence.
    """
    own = {
        name: validate_section(model, name, data.get(name, {}))
        for name, model in OWN_SECTIONS.items()
    }
    if "sft" in data:
        validate_section(SftConfig, "sft", data["sft"])
    sections = {**data, **{name: part.model_dump(mode="json") for name, part in own.items()}}
    return RunConfig(sections=sections, **own)  # pyright: ignore[reportArgumentType]


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run of a TOML run file with overrides, or of a run record (config.json).

    Raises:
        BadInputError: see `parse_run`; a checkpoint directory that is not there.
        FileNotFoundError: no run file.
    """
    if Path(path).suffix == ".json":
        if overrides:
            raise BadInputError("--set", expected="a TOML run file", found=f"run record {path}")
        config = parse_run(read_resolved(path))
    else:
        config = parse_run(read_run_file(path, overrides))
    checkpoint = config.model.checkpoint
    if not (checkpoint / "config.json").is_file():
        raise BadInputError(
            "run file, model.checkpoint",
            expected="a Hugging Face directory with a config.json",
            found=checkpoint if checkpoint.exists() else f"no directory {checkpoint}",
        )
    return config
