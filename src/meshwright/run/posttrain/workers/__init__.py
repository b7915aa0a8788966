"""Engines that draw rollouts in processes of their own, beside the process that trains.

worker_config   how many, and where
worker_main     what runs there: the serving worker, which also takes versions of weights
worker_link     the way to one of them, whatever carries messages
rollout_worker  one of them through all its lives, as the trainer's process knows it
worker_pool     all of them as one engine; who dies is started anew, and draws again what it had
pool_startup    a pool for a trained decoder
deadline        the wait for what has no deadline of its own
ray_workers     the same on the machines of a Ray cluster, which is `ray_cluster`

A generator asks a pool as it asks an engine of its own process: environments, verifiers and the
record of rollouts stay with the trainer, and a worker holds nothing that its death could lose.
"""
