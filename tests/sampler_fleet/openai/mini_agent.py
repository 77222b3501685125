"""The real mini-swe-agent, for one task: `python mini_agent.py URL KEY SESSION MODEL < task`.

Owns nothing of it: agent, prompts, model client and environment are the package's own. Prints how
it ended. Runs in whatever environment has the package, so it imports nothing of the project.
"""

from __future__ import annotations

import os
import sys

os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "2"}
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION"}

import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models import get_model_class

CONFIGS = {"litellm": "mini.yaml", "litellm_textbased": "mini_textbased.yaml"}


def main(url: str, key: str, session: str, kind: str) -> None:
    config = yaml.safe_load((builtin_config_dir / CONFIGS[kind]).read_text())
    arguments = config["model"] | {
        "model_name": "openai/policy",
        "cost_tracking": "ignore_errors",
        "model_kwargs": {
            "drop_params": True,
            "temperature": 0.0,
            "api_base": url,
            "api_key": key,
            "extra_headers": {"X-Session-Id": session},
        },
    }
    model = get_model_class("", kind)(**arguments)
    settings = {k: v for k, v in config["agent"].items() if k.endswith("_template")}
    agent = DefaultAgent(model, LocalEnvironment(cwd=os.getcwd()), **settings, step_limit=10)
    ended = agent.run(sys.stdin.read())
    print(ended["exit_status"])  # noqa: T201


main(*sys.argv[1:])
