"""The ranks of a trace that a command was asked for, one after another, and what was amiss."""

import argparse
from collections.abc import Iterator

from meshwright.cli.analyze import cache_of, jobs_of, numbers
from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.observe.analyze.per_device import per_device
from meshwright.timeline.readers.traces import empty_traces, read_each
from meshwright.timeline.timeline import Timeline


class TraceParts:
    """A path that is read rank by rank; a device that shares its process is a rank of its own."""

    def __init__(self, path: str, args: argparse.Namespace, *, detail: str = "standard") -> None:
        """Nothing is read before it is iterated over."""
        self.path, self._args, self._detail = path, args, detail
        self._wanted = numbers("--rank", args.rank)
        self._others: set[int] = set()
        self._breaks_off = False
        self.count = 0
        """How many ranks came so far."""
        self.damaged: list[str] = []
        """What broke off or is empty, in words."""

    def __iter__(self) -> Iterator[Timeline]:
        self.damaged += empty_traces(self.path)
        jobs, cache = jobs_of(self._args), cache_of(self._args)
        try:
            for whole in read_each(self.path, jobs=jobs, detail=self._detail, cache=cache):
                for part in per_device(whole):
                    if not self._wanted or self._wanted & set(part.ranks):
                        self.count += 1
                        yield part
                    else:
                        self._others.update(part.ranks)
        except DamagedFile as damage:
            self._breaks_off = True
            self.damaged.extend(str(problem) for problem in damage.problems)

    def nothing(self) -> InputError:
        """What to say where no rank came."""
        if self._others:
            known = ", ".join(map(str, sorted(self._others)))
            what, fix = "has none of these ranks", f"name some of {known}"
        else:
            what, fix = "holds no spans", "record some steps with the profiler on"
        return InputError([Problem(self.path, what, fix)])

    def no_device_work(self) -> InputError:
        """What to say where nothing ran on a device."""
        if self._breaks_off:
            what = "breaks off before the first kernel"
            return InputError([Problem(self.path, what, "copy it again, or record it again")])
        fix = "record with ProfilerActivity.CUDA"
        return InputError([Problem(self.path, "has no device work", fix)])
