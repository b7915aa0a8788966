"""Job queues on a virtual clock: what a policy would have made of a cluster's jobs.

`simulate_queue` drives a policy of `policy.job_queue`; `summarize_run` turns the run into figures;
`pack_cluster` fills a cluster to see how much of it a placement gives away; `predict_durations`
guesses durations from history.
"""

from meshwright.predict.job_queue.costs import NodeDrain, NodeFailures, PreemptionCosts
from meshwright.predict.job_queue.durations import DurationPredictor, predict_durations
from meshwright.predict.job_queue.outcome import QueueOutcome, summarize_run
from meshwright.predict.job_queue.packing import SCORERS, pack_cluster
from meshwright.predict.job_queue.replay import QueueReplay
from meshwright.predict.job_queue.simulator import simulate_queue

__all__ = [
    "SCORERS",
    "DurationPredictor",
    "NodeDrain",
    "NodeFailures",
    "PreemptionCosts",
    "QueueOutcome",
    "QueueReplay",
    "pack_cluster",
    "predict_durations",
    "simulate_queue",
    "summarize_run",
]
