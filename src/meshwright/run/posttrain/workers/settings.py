"""`WorkerSettings`: how many engines draw beside a trainer, and where."""

import msgspec

from meshwright.spec.bounds import Bounds


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engines in processes of their own."""

    count: int = 0
    """How many; 0 draws in the process that trains."""
    tp: int = 1
    """Tensor parallel: processes of one engine, each with its part of every product."""
    devices: tuple[str, ...] = ()
    """Device of each worker, such as `cuda:1`, or of its first rank; shared in turn where there are
    fewer. None is the trainer's."""
    restarts: int = 3
    """Workers that may die and are started anew; with one more the run ends."""
    ray: str = ""
    """Address of a Ray cluster whose machines draw, or `local` to start one here."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.count(0, count=self.count, restarts=self.restarts)
        bounds.count(tp=self.tp)
        for device in self.devices:
            bounds.named(devices=device)
        if bounds.sound("count", "tp") and not self.count:
            given = {"tp": self.tp > 1, "devices": bool(self.devices), "ray": bool(self.ray)}
            for name in (each for each, is_given in given.items() if is_given):
                bounds.add(name, "there are no workers", "set count to 1 or more, or leave it out")
        bounds.require()
