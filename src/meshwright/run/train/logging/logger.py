"""`MetricLogger`: what takes the figures of a run, row by row; `MetricLoggers`: several as one."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Protocol

StepMetricValues = Mapping[str, float]
"""Numbers of one step, by name. Known to the progress line are `loss`, `tokens_per_s`, `mfu` and
`data_wait_fraction` (from 0 to 1), and `max_memory_allocated_bytes`; units are in names."""


class MetricLogger(Protocol):
    """Takes rows of figures."""

    def write(self, step: int, figures: StepMetricValues, /) -> None:
        """Take the figures of a step."""

    def close(self) -> None:
        """Finish what was begun; nothing is written after it."""


class MetricLoggers:
    """Several outputs as one; one that fails is warned of and left out from then on.

    A full disk or a broken writer of curves is no reason to end a run.
    """

    def __init__(self, outputs: Mapping[str, MetricLogger]) -> None:
        self._outputs = dict(outputs)

    @property
    def logger_names(self) -> tuple[str, ...]:
        """The outputs that still work."""
        return tuple(self._outputs)

    def write(self, step: int, figures: StepMetricValues) -> None:
        """Write the figures of a step to each."""
        for name, output in list(self._outputs.items()):
            self._attempt(name, partial(output.write, step, figures))

    def close(self) -> None:
        """Close each."""
        for name, output in list(self._outputs.items()):
            self._attempt(name, output.close)
        self._outputs.clear()

    def __enter__(self) -> "MetricLoggers":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _attempt(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - writers of others fail in their own ways
            del self._outputs[name]
            text = f"the output {name} failed and is left out from now on: {error}"
            warnings.warn(text, stacklevel=3)
