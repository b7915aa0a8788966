"""Where the time of a predicted step goes, in the terms that a measured step is told in too."""

from typing import NamedTuple

from meshwright.predict.adapters import trained_parameters
from meshwright.predict.block_time import block_parts
from meshwright.predict.recompute_time import recompute_parts
from meshwright.predict.run import Run
from meshwright.predict.stage_time import embedding_passes, head_parts
from meshwright.predict.step import predict_step, update_parts, updated_parameters
from meshwright.predict.terms import Term
from meshwright.spec.layout import Chunk, rank_chunks, rank_parameters


class StepTerms(NamedTuple):
    """One rank's step, split by kind of work."""

    work: dict[Term, float]
    """Seconds of kernels, those of recompute among their own kind."""
    gaps_s: float
    """Seconds that the device waits for the host to launch."""
    waits_s: float
    """Seconds of exposed communication, bubble and transfers."""

    @property
    def total_s(self) -> float:
        """The whole step."""
        return sum(self.work.values()) + self.gaps_s + self.waits_s


def step_terms(run: Run, rank: int = 0) -> StepTerms:
    """Split the step of one pipeline rank; what no kernel accounts for is waiting."""
    step = predict_step(run)
    work = dict[Term, float]()

    def add(term: Term, seconds: float) -> None:
        if seconds:
            work[term] = work.get(term, 0.0) + seconds

    for chunk in rank_chunks(run.layout, run.model.layers)[rank]:
        for term, seconds in _chunk(run, chunk):
            add(term, run.microbatches * seconds)
    parameters = trained_parameters(run) if run.frozen else rank_parameters(run.layout, run.model)
    update_s, norm_s = update_parts(run, updated_parameters(run, parameters[rank]))
    kernels_s = sum(work.values())
    gaps_s = max(0.0, step.compute_s + step.recompute_s - kernels_s)
    add("optimizer", update_s)
    add("gradient norm", norm_s)
    waits_s = max(0.0, step.step_s - gaps_s - sum(work.values()))
    return StepTerms(work, gaps_s, waits_s)


def _chunk(run: Run, chunk: Chunk) -> list[tuple[Term, float]]:
    """Return the seconds of one microbatch in a chunk, forward and backward."""
    names = run.model.layer_names[chunk.first : chunk.last]
    covered = run.layout.recompute_layers
    share = 1.0 if covered is None or not names else min(1.0, covered / len(names))
    found: list[tuple[Term, float]] = []
    for block in run.model.blocks:
        often = names.count(block.name)
        if not often:
            continue
        found += [
            (term, often * (part.forward + part.backward)) for term, part in block_parts(run, block)
        ]
        found += [
            (term, often * share * part.forward) for term, part in recompute_parts(run, block)
        ]
    if chunk.has_embedding:
        passes = embedding_passes(run)
        found.append(("embedding", passes.forward + passes.backward))
    if chunk.has_head:
        found += [(term, part.forward + part.backward) for term, part in head_parts(run)]
    return found
