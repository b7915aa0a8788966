"""How much a schedule keeps for its backward passes. It counts; bytes come from the caller.

A forward starts to hold one chunk-microbatch; a full backward, or the weight part of a split one,
lets it go.
"""

from collections.abc import Sequence

from meshwright.policy.pipeline.schedule import PipelineSchedule


def count_in_flight(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Return the most chunk-microbatches every rank holds at once."""
    peaks = []
    for lane in schedule.actions:
        held = peak = 0
        for action in lane:
            if action.op == "F":
                held += 1
                peak = max(peak, held)
            elif action.op in ("B", "W"):
                held -= 1
        peaks.append(peak)
    return tuple(peaks)


def find_activation_peaks(
    schedule: PipelineSchedule, chunk_sizes: Sequence[float], kept_after_input: float = 1.0
) -> tuple[float, ...]:
    """Return the most every rank holds at once, where chunks differ in size.

    `chunk_sizes` gives what one microbatch leaves in each chunk, in any unit. After the
    input part of a split backward, `kept_after_input` of it stays for the weight part.
    """
    sizes = list(chunk_sizes)
    change = {
        "F": sizes,
        "B": [-size for size in sizes],
        "I": [-size * (1 - kept_after_input) for size in sizes],
        "W": [-size * kept_after_input for size in sizes],
    }
    peaks = []
    for lane in schedule.actions:
        held = peak = 0.0
        for action in lane:
            if action.op in change:
                held += change[action.op][action.chunk]
                peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)
