"""Arms by name, and what does not compose."""

from __future__ import annotations

import math

import numpy as np
import pytest

from contracts.errors import BadInputError
from contracts.runfile import validate_section
from trainer_jax.loss_config import PRESETS, LossConfig


def parse(**data) -> LossConfig:
    return validate_section(LossConfig, "loss", data)


@pytest.mark.parametrize(
    ("arm", "importance", "center", "replay"),
    [
        ("grpo", "none", False, False),
        ("grpo+mis", "masked", False, False),
        ("mis", "masked", False, False),
        ("grpo+tis", "truncated", False, False),
        ("tis", "truncated", False, False),
        ("grpo+top-p", "none", False, True),
        ("sc", "none", True, False),
        ("sc+mis", "masked", True, False),
        ("sc+mis+top-p", "masked", True, True),
        ("drawn-centering", "masked", "drawn", False),
        ("gspo", "sequence", False, False),
    ],
)
def test_one_setting_chooses_the_arm(arm, importance, center, replay):
    config = parse(arm=arm)
    assert (config.importance, config.center, config.replay) == (importance, center, replay)
    again = parse(**config.model_dump(mode="json"))
    assert again == config, "the run's record reads back the same"


def test_the_default_arm():
    config = parse()
    assert config == parse(arm="sc+mis+top-p")
    assert (config.ratio_low, config.ratio_high) == (0.2, 5.0)
    assert config.reduction == "token-mean" and not config.normalize_advantages
    assert len(PRESETS) == 9


def test_what_the_run_file_says_wins():
    config = parse(arm="sc+mis", ratio_low=0.5, replay=True)
    assert (config.ratio_low, config.ratio_high, config.replay) == (0.5, 5.0, True)
    assert parse(arm="grpo", ratio_low=0.2, ratio_high=5).importance == "none"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"arm": "ppo"}, "sc\\+mis\\+top-p"),
        ({"arm": "grpo", "importance": "masked"}, "ratio_low and ratio_high"),
        ({"arm": "gspo", "importance": "masked", "ratio_low": 0.2}, "ratio_high"),
        ({"ratio_low": 0.0}, "greater than 0"),
        ({"ratio_low": 2.0}, "less than or equal to 1"),
        ({"arm": "gspo", "center": True}, "depends on one token alone"),
        ({"off_policy_limit": 0.1}, "puts back the drift"),
        ({"arm": "grpo", "bands": {"a": {"ratio_low": 0.5, "ratio_high": 2}}}, "masked"),
        (
            {"arm": "tis", "bands": {"a": {"ratio_low": 0.5, "ratio_high": 2}}},
            "say which tokens of a group are masked; 'truncated' masks no token",
        ),
        ({"bands": {"a": {"ratio_low": 0.5}}}, "a value"),
        ({"bands": {"a": {"ratio_low": 1, "ratio_high": 1}}}, "not both 1"),
        ({"ratio_low": 1, "ratio_high": 1}, "not both 1"),
        ({"reduction": "constant", "constant": math.inf}, "constant"),
        ({"arm": "grpo", "off_policy_limit": math.inf}, "off_policy_limit"),
        ({"reduction": "constant"}, "constant"),
        ({"constant": 5.0}, "constant"),
    ],
)
def test_refusals(data, says):
    with pytest.raises(BadInputError, match=says):
        parse(**data)


def test_another_importance_takes_nothing_of_the_weight_it_replaces():
    own = {"importance": "masked", "ratio_low": 0.5, "ratio_high": 2.0}
    assert parse(arm="gspo").reduction == "sequence-mean"
    assert parse(arm="gspo", **own).reduction == "token-mean"
    assert parse(arm="gspo", importance="sequence").reduction == "sequence-mean"
    assert parse(arm="gspo", reduction="sequence-mean", **own).reduction == "sequence-mean"
    assert parse(arm="sc+mis", importance="none").center, "the rest of the arm stays"


def test_sequence_masking_composes_without_centering():
    assert parse(arm="grpo+mis", off_policy_limit=0.1).off_policy_limit == 0.1


def test_bands_of_groups():
    config = parse(bands={"fp4": {"ratio_low": 0.5, "ratio_high": 2.0}})
    bands = np.exp(config.log_bands(("bf16", "fp4")))
    np.testing.assert_allclose(bands, [[0.2, 5], [0.5, 2]], rtol=1e-6)
    with pytest.raises(BadInputError, match="fp4"):
        config.log_bands(("bf16",))
