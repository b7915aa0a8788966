"""Whole layouts of a shape with a schedule: recompute and sharing, each with a lower bound."""

from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from meshwright.predict.plan.bounds.pipeline_bounds import RankBound, bound_ranks
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.search.degree_nodes import DegreeNodes, DegreeSchedule
from meshwright.predict.plan.space.layer_shapes import LayerShape
from meshwright.predict.plan.space.pipeline_schedules import ChunkTimes, sum_chunk_times
from meshwright.predict.plan.space.recompute_options import NO_RECOMPUTE, RecomputeOption
from meshwright.predict.plan.space.sharding_cost import grad_scatter_share, min_exposed_share
from meshwright.predict.plan.space.sharding_options import ShardingOption, StateSharding
from meshwright.predict.plan.space.stage_contents import StageContents
from meshwright.predict.plan.space.zero_groups import ZeroGroup, list_zero_groups
from meshwright.predict.step.offload_time import HostTraffic, pass_traffic, transfer_s
from meshwright.predict.step.pipeline_bubble import NO_BARRIER_SCHEDULES
from meshwright.predict.step.stage_time import StageTime
from meshwright.predict.step.step_prediction import zero3_wait_share
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.layout import Layout, list_chunks


class HostTransferBound:
    """What crosses the links to the host with every pass of a run."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self._states = pass_traffic(run, (0.0,) * run.layout.pp)
        every = list_chunks(run.layout, run.model.layers)
        self._ranks = {chunk.position: chunk.rank for chunk in every}

    def limit_by_transfers(
        self, own: ChunkTimes, more: list[float] | None, activations: tuple[float, ...] | None
    ) -> ChunkTimes:
        """Return chunks whose passes take no less than their transfers.

        `more` is what every chunk's backward takes longer, `activations` the bytes that one chunk
        of every rank moves of them. Waiting for other ranks makes up for some of the wait for the
        host, so that no more than the longer of both is sure.
        """
        forward, backward = list(own.forward_s), list(own.backward_s)
        for place, traffic in enumerate(self._states):
            kept = activations[self._ranks[place]] if activations else 0.0
            there = HostTraffic(
                traffic.forward.to_host_bytes + kept, traffic.forward.to_device_bytes
            )
            back = HostTraffic(
                traffic.backward.to_host_bytes, traffic.backward.to_device_bytes + kept
            )
            again = more[place] if more else 0.0
            forward[place] = max(forward[place], transfer_s(self.run, there))
            backward[place] = max(backward[place], transfer_s(self.run, back) - again)
        return own._replace(forward_s=forward, backward_s=backward)


class LayoutNode(NamedTuple):
    """A whole layout with a lower bound of its step."""

    bound_s: float
    layout: Layout


class LayoutNodes:
    """Finds the layouts of one question that fit."""

    def __init__(self, question: PlanQuestion, frames: DegreeNodes) -> None:
        self.question, self.frames = question, frames
        self.sharding_options = frames.sharding_options
        self.evaluated = 0

    def expand(
        self, shape: LayerShape, staged: DegreeSchedule, limit_s: float
    ) -> Iterator[LayoutNode]:
        """Yield the layouts that fit and may take less than a limit."""
        pipe, stages, frames = staged.schedule_option, staged.stage_contents, self.frames
        layout = pipe.apply_to(shape.layout)
        chunks = sum_chunk_times(shape, frames.chunk_layers, pipe.chunk_layers)
        options = {
            keeping: [
                _Eased(option, least, bound_ranks(shape, pipe, chunks, more, stages.in_flight))
                for option in frames.list_recompute_options(shape, keeping)
                if (least := staged.min_recompute_layers_sharded(keeping)[option.option_index])
                is not None
                for more in (frames.backward_overhead_s(option, pipe.chunk_layers, least),)
            ]
            for keeping in list_zero_groups(self.question, layout)
        }
        keeping_of = {(zero, one.offload): one for one in options for zero in one.zero_stages}
        for way in self.sharding_options.list_options(layout, shape.orders, stages):
            keeping = keeping_of[way.sharding.zero, way.sharding.offload]
            if keeping.offload:
                yield from self._away(shape, staged, way, keeping, limit_s)
                continue
            done = list[list[float]]()
            fewest: list[int | None] | None = None
            for option, least, easiest in options[keeping]:
                if _with_exchange(layout, shape, way, easiest) >= limit_s:
                    continue
                self.evaluated += 1
                if fewest is None:
                    fewest = staged.find_min_recompute_layers(keeping, way.resident_bytes)
                layers = fewest[option.option_index]
                if layers is None:
                    continue
                more = frames.backward_overhead_s(option, pipe.chunk_layers, layers)
                if more is not None:
                    if any(all(a <= b for a, b in zip(one, more, strict=True)) for one in done):
                        continue
                    done.append(more)
                low = easiest
                if layers > least:
                    low = bound_ranks(shape, pipe, chunks, more, stages.in_flight)
                bound = _with_exchange(layout, shape, way, low)
                if bound < limit_s:
                    again = option.choice.apply_to(
                        layout, self._covered(stages.max_chunk_layers, layers)
                    )
                    known = _Least(bound, low, chunks, more)
                    yield from self._variants(again, way.sharding, stages, known, limit_s)
                if not layers:
                    break  # whatever computes something again is slower

    def _away(
        self,
        shape: LayerShape,
        staged: DegreeSchedule,
        way: ShardingOption,
        keeping: ZeroGroup,
        limit_s: float,
    ) -> Iterator[LayoutNode]:
        """Yield the same where something goes to the host."""
        pipe, stages, frames = staged.schedule_option, staged.stage_contents, self.frames
        layout = pipe.apply_to(shape.layout)
        chunks = sum_chunk_times(shape, frames.chunk_layers, pipe.chunk_layers)
        transfers = HostTransferBound(self.question.build_run(way.sharding.apply_to(layout)))
        over = set[int]()
        for option, layers, moved in self._covers(shape, staged, way, keeping):
            if option.option_index in over:
                continue
            self.evaluated += 1
            more = frames.backward_overhead_s(option, pipe.chunk_layers, layers)
            low = bound_ranks(shape, pipe, chunks, more, stages.in_flight)
            if _with_exchange(layout, shape, way, low) >= limit_s:
                over.add(option.option_index)  # the more so on more layers
                continue
            moves = moved and staged.moved_bytes(keeping, option, layers, moved)
            late = transfers.limit_by_transfers(chunks, more, moves or None)
            delayed = bound_ranks(shape, pipe, late, more, stages.in_flight)
            bound = _with_exchange(layout, shape, way, delayed)
            if bound < limit_s:
                again = option.choice.apply_to(
                    layout, self._covered(stages.max_chunk_layers, layers)
                )
                some = moved if moved is not None and moved < stages.max_chunk_layers else None
                again = replace(again, offload=keeping.offload, offload_layers=some)
                known = _Least(bound, low, chunks, more)
                yield from self._variants(again, way.sharding, stages, known, limit_s)

    def _covers(
        self, shape: LayerShape, staged: DegreeSchedule, way: ShardingOption, keeping: ZeroGroup
    ) -> Iterator[tuple[RecomputeOption, int, int | None]]:
        """Yield what fits: options, on how many layers, and of how many activations go.

        As few as fit, but where activations go: computing more of them again may pay, as that much
        less has to move.
        """
        options = self.frames.list_recompute_options(shape, keeping)
        if not keeping.offloads_activations:
            fewest = staged.find_min_recompute_layers(keeping, way.resident_bytes)
            for option in options:
                layers = fewest[option.option_index]
                if layers is not None:
                    yield option, layers, None
            return
        every = staged.find_min_offloaded_layers(keeping, way.resident_bytes)
        for option in options:
            counts = (
                (0,)
                if option.choice == NO_RECOMPUTE
                else range(1, staged.stage_contents.max_chunk_layers + 1)
            )
            for layers in counts:
                moved = every[option.option_index][layers]
                if moved is not None:
                    yield option, layers, moved

    def _covered(self, deepest: int, layers: int) -> int | None:
        """Return the layers of a chunk to name; heads that look ahead have layers of their own."""
        whole = layers == deepest and self.question.model.multi_token is None
        return None if whole or not layers else layers

    def _variants(
        self,
        layout: Layout,
        sharing: StateSharding,
        stages: StageContents,
        least: "_Least",
        limit_s: float,
    ) -> Iterator[LayoutNode]:
        """Yield one layout with every sound choice of overlap."""
        for one in self.sharding_options.list_overlap_variants(sharing):
            whole, bound = one.apply_to(layout), least.bound_s
            if one.zero > 1:
                bound = max(bound, _carried(self.question.build_run(whole), stages, least))
            if bound < limit_s:
                for overlap in self._overlaps_sends(layout):
                    yield LayoutNode(bound, replace(whole, overlap_pp=overlap))

    def _overlaps_sends(self, layout: Layout) -> tuple[bool, ...]:
        """Return whether sends may run beside compute, where there are any."""
        if layout.pp == 1:
            return (layout.overlap_pp,)
        return self.question.space.get_allowed("overlap_pp") or ()


class _Least(NamedTuple):
    """What a layout takes at the least, whatever it overlaps."""

    bound_s: float
    low: list[RankBound]
    chunks: ChunkTimes
    more: list[float] | None


class _Eased(NamedTuple):
    """A recompute option on as few layers as any way to share allows."""

    option: RecomputeOption
    layers: int
    low: list[RankBound]


def _with_exchange(
    layout: Layout, shape: LayerShape, shared: ShardingOption, low: list[RankBound]
) -> float:
    """Return the least a step takes with its exchange of gradients and parameters."""
    run, sharing, most = shape.run, shared.sharding, 0.0
    # Ranks that end apart update by themselves; others wait for the longest update.
    apart, longest = layout.schedule in NO_BARRIER_SCHEDULES and layout.pp > 1, shared.update_s
    exposed = min_exposed_share(run)
    first = exposed if sharing.overlap_parameters else 1.0
    last = exposed if sharing.overlap_gradients else 1.0
    ranks = zip(shared.dp_comm, low, shared.updates_s, strict=True)
    for (reduce_s, gather_s), (fill, busy, drain), update_s in ranks:
        begin, end = first * gather_s, last * reduce_s
        whole = (begin if begin > fill else fill) + busy + (end if end > drain else drain)
        most = max(most, whole + (update_s if apart else longest))
    return most


def _carried(run: TrainingRun, stages: StageContents, least: _Least) -> float:
    """Return the least the busiest rank takes where passes wait for sharded states."""
    low, chunks, more = least.low, least.chunks, least.more
    rank = max(range(len(low)), key=lambda index: low[index].busy_s)
    own = stages.chunks[rank]
    forward = sum([chunks.forward_s[chunk] for chunk in own])
    backward = sum([chunks.backward_s[chunk] + (more[chunk] if more else 0.0) for chunk in own])
    stage = StageTime(forward, backward, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    wait = zero3_wait_share(run, stage, *stages.ranks[rank])
    fill, busy, drain = low[rank]
    if run.layout.zero == 2:
        wait *= backward / (forward + backward)
        wait *= grad_scatter_share(run.num_microbatches, run.layout.schedule)
    times = run.num_microbatches / (2 if run.layout.schedule == "dualpipe" else 1)
    return fill + busy + wait * times * (forward + backward) + drain
