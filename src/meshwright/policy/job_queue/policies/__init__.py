"""Job queue policies: backfill, multifactor, preemption, fairness, quotas and elastic jobs.

`ordered_queue`, `preemptive_order` and `shape_queues` hold shared base classes and queues.
"""
