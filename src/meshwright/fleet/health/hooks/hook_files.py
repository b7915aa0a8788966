"""Scripts and settings by which clusters look at their nodes: Slurm's prolog, Kubernetes."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import yaml

from meshwright.errors import InputError, Problem
from meshwright.fleet.health.xids import list_drain_xids

HOOK_KINDS: Final = ("slurm", "kubernetes")
NODE_CONDITION: Final = "GPUUnhealthy"
"""The condition that a node gets in Kubernetes."""
_PLACE: Final = "/etc/node-problem-detector/meshwright"
_CONF: Final = """\
# Settings of check.sh, prolog.sh and epilog.sh, which read this file from their own folder.
DRAIN={drain}  # yes: drain unfit nodes by scontrol; no: only log what is found
GPUS=            # how many GPUs the node has; empty: not checked
LIMIT_S=20       # longest that one question to the driver may take
WHOLE_S=60       # longest that the whole check may take, without measuring
BACK_S=900       # how far back the kernel's log is looked through
ECC=no           # yes: uncorrected memory errors since the last reset make a node unfit
INFINIBAND=no    # yes: every port that is not disabled must be active
BENCH=no         # yes: before a job also measure: mw bench --quick --health-check
BENCH_S=120      # longest that measuring may take
"""


def write_hooks(kind: str, folder: Path, *, drain: bool = False) -> tuple[Path, ...]:
    """Write what a scheduler needs to look at its nodes; returns the files."""
    made = render_slurm(drain=drain) if kind == "slurm" else render_kubernetes()
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in made.items():
            path = folder / name
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755 if name.endswith(".sh") else 0o644)
            written.append(path)
    except OSError as error:
        what = f"cannot write hooks: {error.strerror or error}"
        raise InputError([Problem(str(folder), what, "name a folder with --out")]) from None
    return tuple(written)


def render_check() -> str:
    """Return the check, with the Xids that call for a drain."""
    return _text("check.sh").replace("@XIDS@", " ".join(map(str, list_drain_xids())))


def render_slurm(*, drain: bool) -> dict[str, str]:
    """Return prolog, epilog, the check that both run, and their settings."""
    return {
        "check.sh": render_check(),
        "prolog.sh": _text("prolog.sh"),
        "epilog.sh": _text("epilog.sh"),
        "health.conf": _CONF.format(drain="yes       " if drain else "no        "),
    }


def render_kubernetes() -> dict[str, str]:
    """Return settings of node-problem-detector, the check, and a ConfigMap that holds both."""
    made = {
        "check.sh": render_check(),
        "health-plugin.json": _json(_plugin()),
        "kernel-monitor.json": _json(_kernel_monitor()),
    }
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "meshwright-node-health", "namespace": "kube-system"},
        "data": made,
    }
    return made | {"configmap.yaml": yaml.safe_dump(config, sort_keys=False)}


def _plugin() -> dict[str, Any]:
    """A custom plugin: exit 0 is fine, 1 is a problem, 2 unknown."""
    return {
        "plugin": "custom",
        "pluginConfig": {
            "invoke_interval": "60s",
            "timeout": "50s",
            "max_output_length": 80,
            "concurrency": 1,
            "enable_message_change_based_condition_update": False,
        },
        "source": "meshwright-health",
        "metricsReporting": True,
        "conditions": [
            {"type": NODE_CONDITION, "reason": "GPUsAreFit", "message": "GPUs of this node are fit"}
        ],
        "rules": [
            {
                "type": "permanent",
                "condition": NODE_CONDITION,
                "reason": "GPUsAreUnfit",
                "path": f"{_PLACE}/check.sh",
                "timeout": "45s",
            }
        ],
    }


def _kernel_monitor() -> dict[str, Any]:
    """Events from the log of the kernel; the condition is left to the plugin."""
    codes = "|".join(map(str, list_drain_xids()))
    return {
        "plugin": "kmsg",
        "logPath": "/dev/kmsg",
        "lookback": "5m",
        "bufferSize": 10,
        "source": "meshwright-kernel",
        "conditions": [],
        "rules": [
            {
                "type": "temporary",
                "reason": "GPUHardwareXid",
                "pattern": rf"NVRM: Xid \(.*\): ({codes})\b.*",
            },
            {
                "type": "temporary",
                "reason": "NVSwitchFatal",
                "pattern": r"nvidia-nvswitch\d*: .*SXid \(.*\): \d+, Fatal.*",
            },
        ],
    }


def _json(made: dict[str, Any]) -> str:
    return json.dumps(made, indent=2) + "\n"


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
