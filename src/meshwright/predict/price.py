"""What tokens cost in dollars, at the cluster's price and a predicted speed."""

from meshwright.spec.job_spec import JobSpec

TRILLION = 1e12


def dollars_per_trillion_tokens(work: JobSpec, tokens_per_s: float) -> float | None:
    """Return the price of training on a trillion tokens; None where the cluster has no price."""
    hourly = work.cluster.price_per_gpu_hour
    if hourly is None:
        return None
    return TRILLION / tokens_per_s / 3600 * hourly * work.layout.gpus
