"""Scheduling for serving engines: scheduler, queues, prefix cache, host blocks and router.

The serving engine and the serving simulator run the same `Scheduler`.
"""
