"""Pipeline parallelism: stages, point-to-point transfers and the schedule runner."""
