"""Engines that draw rollouts in processes of their own, beside the process that trains.

settings     how many, and where
process      what runs there: the serving worker, which also takes versions of weights
links        the way to one of them, whatever carries messages
worker       one of them through all its lives, as the trainer's process knows it
fleet        all of them as one engine; who dies is started anew, and draws again what it had
hiring       a fleet for a trained decoder
in_time      the wait for what has no deadline of its own
ray_workers  the same on the machines of a Ray cluster

A generator asks a fleet as it asks an engine of its own process: environments, verifiers and the
record of rollouts stay with the trainer, and a worker holds nothing that its death could lose.
"""
