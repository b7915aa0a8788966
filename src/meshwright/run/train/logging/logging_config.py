"""`LoggingConfig`: where the figures of a run go."""

from typing import Literal, get_args

import msgspec

from meshwright.spec.field_checks import FieldChecker, check_integer

ProgressMode = Literal["auto", "bar", "lines", "none"]


class WandbConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights & Biases, offline: the run is written to its folder and nothing leaves the machine.

    `wandb sync` uploads it later, where that is wanted.
    """

    project: str = "meshwright"
    name: str | None = None
    """What the run is called there; None takes the name of its folder."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.not_empty(project=self.project)
        if self.name is not None:
            bounds.not_empty(name=self.name)
        bounds.raise_problems()


class PrometheusConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An HTTP page that a Prometheus server reads the newest figures from."""

    port: int = 9400
    """0 takes any free one."""
    host: str = "127.0.0.1"
    """Address to listen on. The page has no password: give another one only in a closed network."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.problems += check_integer("port", self.port, 0, 65_535)
        bounds.not_empty(host=self.host)
        bounds.raise_problems()


class LoggingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which outputs a run writes, and how often."""

    every_steps: int = 1
    """Steps between two rows."""
    jsonl: bool = True
    """Write `metrics.jsonl`: one JSON object for each row."""
    tensorboard: bool = False
    """Write `tensorboard/` for TensorBoard."""
    timeline: bool = True
    """Of a run over several ranks, write what each does and waits for into `timeline/`."""
    timeline_keep_steps: int = 200
    """The newest steps that are there: at least so many, at most twice as many."""
    wandb: WandbConfig | None = None
    """Write `wandb/` for Weights & Biases."""
    prometheus: PrometheusConfig | None = None
    """Show the newest figures to Prometheus."""
    progress: ProgressMode = "auto"
    """On stderr: a bar where a person watches and lines elsewhere, or one of them always."""
    log_interval_s: float = 10.0
    """Time between two lines of progress."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.mark_unreadable(wandb=self.wandb, prometheus=self.prometheus)
        bounds.count(every_steps=self.every_steps, timeline_keep_steps=self.timeline_keep_steps)
        bounds.not_negative(log_interval_s=self.log_interval_s)
        bounds.one_of("progress", self.progress, get_args(ProgressMode))
        bounds.raise_problems()

    def should_log(self, step: int) -> bool:
        """Tell whether a row is written after this step."""
        return step % self.every_steps == 0


NO_LOGGING = LoggingConfig(jsonl=False, timeline=False, progress="none")
"""What a rank writes that does not speak for its run."""
