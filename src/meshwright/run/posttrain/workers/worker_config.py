"""`WorkerConfig`: how many engines draw beside a trainer, and where."""

import msgspec

from meshwright.spec.field_checks import FieldChecker


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engines in processes of their own."""

    num_workers: int = 0
    """How many; 0 draws in the process that trains."""
    tensor_parallel_size: int = 1
    """Tensor parallel: processes of one engine, each with its part of every product."""
    devices: tuple[str, ...] = ()
    """Device of each worker, such as `cuda:1`, or of its first rank; shared in turn where there are
    fewer. None is the trainer's."""
    max_restarts: int = 3
    """Workers that may die and are started anew; with one more the run ends."""
    ray_address: str = ""
    """Address of a Ray cluster whose machines draw, or `local` to start one here."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(0, num_workers=self.num_workers, max_restarts=self.max_restarts)
        bounds.count(tensor_parallel_size=self.tensor_parallel_size)
        for device in self.devices:
            bounds.not_empty(devices=device)
        if bounds.is_valid("num_workers", "tensor_parallel_size") and not self.num_workers:
            given = {
                "tensor_parallel_size": self.tensor_parallel_size > 1,
                "devices": bool(self.devices),
                "ray_address": bool(self.ray_address),
            }
            for name in (each for each, is_given in given.items() if is_given):
                bounds.add(
                    name, "there are no workers", "set num_workers to 1 or more, or leave it out"
                )
        bounds.raise_problems()
