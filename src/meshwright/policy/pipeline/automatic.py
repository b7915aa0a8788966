"""`zero_bubble`: the zero-bubble order that suits given pass lengths and memory."""

from typing import Literal

from meshwright.policy.pipeline.building import build, forms, within
from meshwright.policy.pipeline.earliest import Lengths
from meshwright.policy.pipeline.lane import Asked
from meshwright.policy.pipeline.schedule import Schedule
from meshwright.policy.pipeline.tuning import finish, tune

Shape = Literal["straight", "folded"]
"""One chunk per rank, or two with the model folded at the last rank."""


def zero_bubble(
    ranks: int,
    microbatches: int,
    lengths: Lengths,
    *,
    shape: Shape = "straight",
    max_in_flight: int | None = None,
) -> Schedule:
    """Return the shortest zero-bubble schedule found for passes of these lengths.

    The handmade schedules hold for passes of equal length; this tunes each of them, the zb-h kinds
    for the straight shape and the V kinds for the folded one, and keeps the best. It is a good
    order, not a proven optimum. `max_in_flight` is the most chunk-microbatches a rank may hold;
    None takes that of zb-h2 or zb-v.
    """
    if shape == "folded" and ranks > 1:
        usual = build("zb-v", ranks, microbatches)
        limit = 2 * ranks if max_in_flight is None else max_in_flight
        found = within(forms(usual, Asked(ranks, microbatches, 2)), limit)
    else:
        limit = 2 * ranks - 1 if max_in_flight is None else max_in_flight
        found = [
            build("zb-h1", ranks, microbatches, max_in_flight=limit),
            build("zb-h2", ranks, microbatches, max_in_flight=limit),
        ]
    tuned = (tune(form, lengths, limit) for form in found)
    return min(tuned, key=lambda one: finish(one, lengths))
