"""Where the time of a predicted step goes, in the terms that a measured step is told in too."""

from typing import NamedTuple

from meshwright.predict.step.block_time import list_block_kernels
from meshwright.predict.step.kernel_kinds import KernelKind
from meshwright.predict.step.optimizer_step import count_updated_parameters, update_kernel_times_s
from meshwright.predict.step.recompute_time import list_recomputed_kernels
from meshwright.predict.step.stage_time import embedding_passes, list_head_kernels
from meshwright.predict.step.step_prediction import predict_step
from meshwright.predict.training_run.lora_shapes import count_trained_parameters
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.layout import ModelChunk, count_rank_parameters, list_chunks_by_rank


class StepBreakdown(NamedTuple):
    """One rank's step, split by kind of work."""

    kernels_s: dict[KernelKind, float]
    """Seconds of kernels, those of recompute among their own kind."""
    launch_gaps_s: float
    """Seconds that the device waits for the host to launch."""
    waits_s: float
    """Seconds of exposed communication, bubble and transfers."""

    @property
    def total_s(self) -> float:
        """The whole step."""
        return sum(self.kernels_s.values()) + self.launch_gaps_s + self.waits_s


def break_down_step(run: TrainingRun, rank: int = 0) -> StepBreakdown:
    """Split the step of one pipeline rank; what no kernel accounts for is waiting."""
    step = predict_step(run)
    work = dict[KernelKind, float]()

    def add(term: KernelKind, seconds: float) -> None:
        if seconds:
            work[term] = work.get(term, 0.0) + seconds

    for chunk in list_chunks_by_rank(run.layout, run.model.layers)[rank]:
        for term, seconds in _chunk(run, chunk):
            add(term, run.num_microbatches * seconds)
    parameters = (
        count_trained_parameters(run)
        if run.frozen
        else count_rank_parameters(run.layout, run.model)
    )
    update_s, norm_s = update_kernel_times_s(run, count_updated_parameters(run, parameters[rank]))
    kernels_s = sum(work.values())
    gaps_s = max(0.0, step.compute_s + step.recompute_s - kernels_s)
    add("optimizer", update_s)
    add("gradient_norm", norm_s)
    waits_s = max(0.0, step.step_s - gaps_s - sum(work.values()))
    return StepBreakdown(work, gaps_s, waits_s)


def _chunk(run: TrainingRun, chunk: ModelChunk) -> list[tuple[KernelKind, float]]:
    """Return the seconds of one microbatch in a chunk, forward and backward."""
    names = run.model.layer_names[chunk.first : chunk.last]
    covered = run.layout.recompute_layers
    share = 1.0 if covered is None or not names else min(1.0, covered / len(names))
    found: list[tuple[KernelKind, float]] = []
    for block in run.model.blocks:
        often = names.count(block.name)
        if not often:
            continue
        found += [
            (term, often * (part.forward_s + part.backward_s))
            for term, part in list_block_kernels(run, block)
        ]
        found += [
            (term, often * share * part.forward_s)
            for term, part in list_recomputed_kernels(run, block)
        ]
    if chunk.has_embedding:
        passes = embedding_passes(run)
        found.append(("embedding", passes.forward_s + passes.backward_s))
    if chunk.has_head:
        found += [(term, part.forward_s + part.backward_s) for term, part in list_head_kernels(run)]
    return found
