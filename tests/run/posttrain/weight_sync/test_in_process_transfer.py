"""Whatever the layouts, an engine gets the trainer's weights bit by bit, whole or not at all."""

from functools import cache
from itertools import product

import pytest

pytest.importorskip("torch", reason="moves weights")

import torch

from meshwright.errors import InputError
from meshwright.policy.resharding.weight_transfer import FanOut, plan_weight_transfer
from meshwright.run.nn.sharding.sharded_tensor import ShardedTensor
from meshwright.run.posttrain.weight_sync.bucket_packing import (
    CorruptBucketError,
    Fp8RowwiseTensor,
    cast_formats,
)
from meshwright.run.posttrain.weight_sync.in_process_transfer import InProcessTransfer
from meshwright.run.posttrain.weight_sync.weight_buffer import (
    IncompleteVersionError,
    PartialWeightUpdateError,
)
from meshwright.run.posttrain.weight_sync.weight_tensors import describe_shards
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from tests.run.posttrain.weight_sync.virtual_ranks import (
    DENSE,
    ROUTED,
    TIED,
    differing,
    masters,
    on_gpu,
    served,
    sources,
)

MODELS = {"dense": DENSE, "tied": TIED, "experts": ROUTED}
TRAINED = {
    "one": Layout(),
    "tp2": Layout(tp=2, sequence_parallel=True),
    "tp4": Layout(tp=4),  # two ranks hold the same key and value head
    "dp3-zero1": Layout(dp=3, zero=1),
    "dp2-zero3": Layout(dp=2, zero=3),
    "pp2": Layout(pp=2),
    "pp2-uneven": Layout(pp=2, stage_layers=(1, 3)),
    "pp4-dp2-zero2": Layout(pp=4, dp=2, zero=2),
    "interleaved": Layout(pp=2, virtual_stages=2, schedule="interleaved"),
    "dualpipe": Layout(pp=2, schedule="dualpipe"),
    "dualpipe-v": Layout(pp=2, virtual_stages=2, schedule="dualpipe-v"),
    "tp2-cp2-dp2-zero3": Layout(tp=2, cp=2, dp=2, zero=3),
    "tp4-dp2-zero3": Layout(tp=4, dp=2, zero=3),
    "tp2-pp2-dp2-zero3": Layout(tp=2, pp=2, dp=2, zero=3),
    "dp8-zero3": Layout(dp=8, zero=3),
    "dp8-shard4": Layout(dp=8, zero=3, shard=4),
    "dp4-ep4": Layout(dp=4, ep=4),
    "dp4-ep2-zero3": Layout(dp=4, ep=2, zero=3),
    "tp2-dp2-ep4": Layout(tp=2, dp=2, ep=4, expert_tp=1),
    "tp2-pp2-dp2-ep2-zero3": Layout(tp=2, pp=2, dp=2, ep=2, zero=3),
}
SERVED = {"tp1": Layout(), "tp2": Layout(tp=2), "tp4": Layout(tp=4), "ep4": Layout(dp=4, ep=4)}


def fits(model: str, layout: Layout) -> bool:
    return model == "experts" or layout.ep == 1


trained = cache(sources)


def carried(
    model: Model,
    source: list[dict[str, ShardedTensor]],
    engine: Layout,
    *,
    engines: int = 1,
    fan: FanOut = "direct",
    dtype: torch.dtype = torch.bfloat16,
    fp8: bool = False,
    most_bytes: int = 2048,
) -> list[str]:
    """Send weights of seed 1 to engines with weights of seed 2; name what then differs."""
    old, right = (
        [
            each
            for _ in range(engines)
            for each in served(model, engine, dtype=dtype, seed=seed, fp8=fp8)
        ]
        for seed in (2, 1)
    )
    plan = plan_weight_transfer(
        [describe_shards(each) for each in source], [describe_shards(each) for each in old], fan=fan
    )
    before = differing(old, right)
    carrier = InProcessTransfer(plan, source, old, most_bytes=most_bytes)
    carrier.transfer(1)
    assert differing(old, right) == before != [], "nothing is taken before all of it is there"
    carrier.commit()
    assert [each.version for each in carrier.buffers] == [1] * len(old)
    return differing(old, right)


@pytest.mark.parametrize(
    ("model", "layout"),
    [(m, name) for m, (name, each) in product(MODELS, TRAINED.items()) if fits(m, each)],
)
def test_engines_get_the_trainers_weights_bit_by_bit(model: str, layout: str) -> None:
    source = trained(MODELS[model], TRAINED[layout])
    for engine in (each for each in SERVED.values() if fits(model, each)):
        assert carried(MODELS[model], source, engine) == []


@pytest.mark.parametrize("fan", ["direct", "broadcast"])
def test_several_engines(fan: FanOut) -> None:
    source = trained(DENSE, TRAINED["tp2-pp2-dp2-zero3"])
    assert carried(DENSE, source, Layout(tp=2), engines=3, fan=fan) == []


@pytest.mark.parametrize("layout", ["one", "tp4", "tp2-pp2-dp2-zero3"])
@pytest.mark.parametrize("engine", ["tp1", "tp2"])
def test_fp32_weights_become_bf16_or_fp8_as_if_the_engine_had_read_them(
    layout: str, engine: str
) -> None:
    exact = trained(DENSE, TRAINED[layout], dtype=torch.float32)
    rounded = [
        {
            name: ShardedTensor(each.tensor.bfloat16(), each.global_shape, each.chunks)
            for name, each in rank.items()
        }
        for rank in exact
    ]
    for fp8 in (False, True):
        old = [served(DENSE, SERVED[engine], seed=2, fp8=fp8) for _ in range(2)]
        for source, target in zip((exact, rounded), old, strict=True):
            plan = plan_weight_transfer(
                list(map(describe_shards, source)), list(map(describe_shards, target))
            )
            carrier = InProcessTransfer(plan, source, target)
            carrier.transfer(1)
            carrier.commit()
        assert differing(*old) == []
        scales = [
            place.scale for each in old[0] for place in each.values() if place.scale is not None
        ]
        assert bool(scales) == fp8


@pytest.mark.parametrize("layout", ["tp2", "dp2-zero3", "pp2"])
def test_fp8_is_what_quantising_the_same_weights_gives(layout: str) -> None:
    source = trained(DENSE, TRAINED[layout])
    for engine in (Layout(), Layout(tp=2)):
        assert carried(DENSE, source, engine, fp8=True) == []


@pytest.mark.parametrize("layout", [Layout(tp=2, dp=2, zero=1), Layout(pp=2, dp=2, zero=3)])
def test_masters_are_sent_from_who_updates_them(layout: Layout) -> None:
    source, alone = (masters(DENSE, each, steps=3) for each in (layout, Layout()))
    assert {each.tensor.dtype for rank in source for each in rank.values()} == {torch.float32}
    engines = []
    for trained_ in (source, alone):
        engine = served(DENSE, Layout(), dtype=torch.float32, seed=2, fp8=False)
        plan = plan_weight_transfer(
            list(map(describe_shards, trained_)), list(map(describe_shards, engine))
        )
        carrier = InProcessTransfer(plan, trained_, engine)
        carrier.transfer(1)
        carrier.commit()
        engines.append(engine)
    assert differing(*engines) == []
    first = served(DENSE, Layout(), dtype=torch.float32, seed=1, fp8=False)
    assert len(differing(engines[0], first)) == len(first[0]), "all have been updated"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fp8", [False, True])
def test_a_gpu_packs_and_takes_the_same_bits(fp8: bool) -> None:
    source = [
        {
            name: ShardedTensor(each.tensor.cuda(), each.global_shape, each.chunks)
            for name, each in rank.items()
        }
        for rank in trained(DENSE, TRAINED["tp2-pp2-dp2-zero3"])
    ]
    target = [
        {name: on_gpu(place) for name, place in rank.items()}
        for rank in served(DENSE, Layout(tp=2), seed=2, fp8=fp8)
    ]
    plan = plan_weight_transfer(
        list(map(describe_shards, source)), list(map(describe_shards, target))
    )
    carrier = InProcessTransfer(plan, source, target)
    carrier.transfer(1)
    carrier.commit()
    for rank, right in zip(target, served(DENSE, Layout(tp=2), seed=1, fp8=False), strict=True):
        for name, place in rank.items():
            made = cast_formats(right[name].sharded_tensor.tensor.cuda(), place.formats)
            data = made.data if isinstance(made, Fp8RowwiseTensor) else made
            assert torch.equal(
                place.sharded_tensor.tensor.view(torch.uint8), data.view(torch.uint8)
            ), name
            assert place.scale is None or torch.equal(place.scale, cast_scale(made)), name


def cast_scale(made: torch.Tensor | Fp8RowwiseTensor) -> torch.Tensor:
    assert isinstance(made, Fp8RowwiseTensor)
    return made.scale


def test_bf16_weights_fill_an_engine_in_fp32() -> None:
    source = trained(DENSE, TRAINED["tp2"])
    target = served(DENSE, Layout(), dtype=torch.float32, seed=2, fp8=False)
    plan = plan_weight_transfer(
        list(map(describe_shards, source)), list(map(describe_shards, target))
    )
    carrier = InProcessTransfer(plan, source, target)
    carrier.transfer(1)
    carrier.commit()
    right = served(DENSE, Layout(), seed=1, fp8=False)[0]
    for name, place in target[0].items():
        assert torch.equal(
            place.sharded_tensor.tensor, right[name].sharded_tensor.tensor.float()
        ), name


def test_a_damaged_parcel_is_refused_and_the_old_version_stays() -> None:
    source = trained(DENSE, TRAINED["tp2"])
    target, untouched = (served(DENSE, Layout(), seed=2, fp8=False) for _ in range(2))
    plan = plan_weight_transfer(
        list(map(describe_shards, source)), list(map(describe_shards, target))
    )
    carrier = InProcessTransfer(plan, source, target, most_bytes=2048)
    carrier.transfer(3)
    arrivals = carrier.buffers[0]
    first = arrivals.buckets[0]
    arrivals.get_buffer(first)[5] ^= 1
    with pytest.raises(CorruptBucketError, match=f"bucket {first.index} from source 0 .*checksum"):
        arrivals.accept_bucket(first)
    words = arrivals.get_buffer(first).view(torch.int64)
    arrivals.get_buffer(first)[5] ^= 1
    arrivals.accept_bucket(first)
    words[[0, 1]] = words[[1, 0]]
    with pytest.raises(CorruptBucketError, match="checksum"):
        arrivals.accept_bucket(first)
    arrivals.discard()
    assert differing(target, untouched) == []
    assert arrivals.version == 0


def test_versions_come_whole_in_order_and_by_one_plan() -> None:
    source = trained(DENSE, TRAINED["tp2"])
    target = served(DENSE, Layout(), seed=2, fp8=False)
    plan = plan_weight_transfer(
        list(map(describe_shards, source)), list(map(describe_shards, target))
    )
    carrier = InProcessTransfer(plan, source, target)
    arrivals = carrier.buffers[0]
    with pytest.raises(InputError, match="call expect first"):
        arrivals.commit()
    arrivals.begin_version(1)
    with pytest.raises(IncompleteVersionError, match=r"2 of 2 buckets .* from sources \[0, 1\]"):
        carrier.commit()
    carrier.transfer(4)
    arrivals.begin_version(5)
    assert len(arrivals.missing) == 2, "what came of another version is dropped"
    carrier.transfer(5)
    parcel = arrivals.buckets[0]
    late = arrivals.get_buffer(parcel).clone()
    arrivals.begin_version(6)
    arrivals.use_external_buffer(parcel, late)
    with pytest.raises(CorruptBucketError, match="brings version 5, version 6 is awaited"):
        arrivals.accept_bucket(parcel)
    carrier.transfer(7)
    carrier.commit()
    with pytest.raises(InputError, match="7 is no newer than 7"):
        carrier.transfer(7)
    other = plan_weight_transfer(
        list(map(describe_shards, source)), list(map(describe_shards, target)), target_seats=(9,)
    )
    strange = InProcessTransfer(other, source, served(DENSE, Layout(), seed=2, fp8=False))
    strange.transfer(8)
    arrivals.begin_version(8)
    arrivals.use_external_buffer(
        parcel, strange.buffers[0].get_buffer(strange.buffers[0].buckets[0])
    )
    with pytest.raises(CorruptBucketError, match="another plan"):
        arrivals.accept_bucket(parcel)


def test_a_model_that_was_half_written_says_so_until_it_is_whole() -> None:
    source = trained(DENSE, TRAINED["one"])
    target = served(DENSE, Layout(), seed=2, fp8=False)
    plan = plan_weight_transfer(
        list(map(describe_shards, source)), list(map(describe_shards, target))
    )
    carrier = InProcessTransfer(plan, source, target)
    arrivals = carrier.buffers[0]
    name = list(target[0])[-1]
    lost = target[0].pop(name)
    arrivals.targets = dict(target[0])
    carrier.transfer(1)
    with pytest.raises(PartialWeightUpdateError, match="version 1 broke off"):
        carrier.commit()
    with pytest.raises(PartialWeightUpdateError, match="send it again whole"):
        arrivals.require_consistent()
    assert arrivals.version == 0
    arrivals.targets = {**target[0], name: lost}
    carrier.transfer(1)
    carrier.commit()
    arrivals.require_consistent()
    assert arrivals.version == 1
