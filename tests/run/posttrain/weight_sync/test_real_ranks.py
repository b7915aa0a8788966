"""Real processes send each other weights: by gloo, and through memory that they share."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="runs gloo ranks")

from meshwright.policy.resharding.weight_transfer import FanOut, plan_weight_transfer
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks, spawn_ranks_with_results
from meshwright.run.posttrain.weight_sync.bucket_packing import CorruptBucketError
from meshwright.run.posttrain.weight_sync.shared_memory_transfer import (
    SharedMemoryReader,
    SharedMemoryWriter,
    VersionTimeoutError,
)
from meshwright.run.posttrain.weight_sync.weight_tensors import describe_shards
from meshwright.spec.layout import Layout
from tests.run.posttrain.weight_sync.sending_ranks import damaged, deserted, sent, shared
from tests.run.posttrain.weight_sync.virtual_ranks import DENSE, differing, served, sources


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "engine", "together", "fan", "fp8"),
    [
        (Layout(tp=2), Layout(tp=2), False, "direct", False),
        (Layout(pp=2, dp=2), Layout(tp=4), False, "direct", False),
        (Layout(tp=2, pp=2), Layout(dp=2), False, "broadcast", False),
        (Layout(dp=4, zero=3), Layout(tp=2), True, "direct", False),
        (Layout(tp=2, dp=2, zero=3), Layout(tp=4), True, "direct", True),
        (Layout(tp=2, pp=2, dp=2, zero=3), Layout(dp=4, tp=2), True, "broadcast", False),
    ],
)
def test_gloo_ranks_take_versions_bit_by_bit(
    trainer: Layout, engine: Layout, together: bool, fan: FanOut, fp8: bool
) -> None:
    ranks = max(trainer.gpus, engine.gpus) if together else trainer.gpus + engine.gpus
    assert spawn_ranks(ranks, sent, trainer, engine, together, fan, fp8) == [[]] * ranks


@pytest.mark.slow
def test_where_one_rank_gets_damage_nobody_takes_the_version() -> None:
    told = spawn_ranks(4, damaged, Layout(dp=2), Layout(tp=2))
    assert [changed for _, changed in told] == [[]] * 4
    for said, _ in told[:3]:
        assert said == "version 1 was received by nobody: ranks [3] did not get it whole"
    assert "checksum is wrong" in told[3][0]


@pytest.mark.slow
def test_where_a_source_dies_engines_keep_what_they_have() -> None:
    outcomes = spawn_ranks_with_results(3, deserted, Layout(pp=2), Layout(), timeout_s=60)
    assert outcomes[0].exit_code == 7
    assert outcomes[1].value[0].startswith("version 1 "), "who can send says so as well"
    said, changed = outcomes[2].value
    assert said.startswith("version 1 broke off between ranks [0, 1, 2]")
    assert changed == []


@pytest.mark.slow
def test_processes_share_memory(tmp_path: Path) -> None:
    assert spawn_ranks(4, shared, tmp_path, Layout(pp=2), Layout(dp=2)) == [[]] * 4
    assert list(tmp_path.iterdir()) == []


def test_what_is_posted_is_fetched_when_it_is_complete(tmp_path: Path) -> None:
    source = sources(DENSE, Layout(dp=2, zero=3))
    engine, right, old = (served(DENSE, Layout(tp=2), seed=seed, fp8=False) for seed in (2, 1, 2))
    plan = plan_weight_transfer(
        list(map(describe_shards, source)), list(map(describe_shards, engine))
    )
    posts = [SharedMemoryWriter(plan, rank, each, tmp_path) for rank, each in enumerate(source)]
    fetches = [SharedMemoryReader(plan, rank, each, tmp_path) for rank, each in enumerate(engine)]
    posts[0].write(5)
    with pytest.raises(
        VersionTimeoutError, match=r"version 5: sources \[1\] have not published it within 0 s"
    ):
        fetches[0].load(5, patience_s=0)
    assert sum(each.write(5) for each in posts) > plan.moved_bytes
    file = tmp_path / "version-5" / "source-1.weights"
    sound = file.read_bytes()
    file.write_bytes(sound[:100] + bytes([sound[100] ^ 1]) + sound[101:])
    said = []
    for each in fetches:
        try:
            each.load(5, patience_s=0)
        except CorruptBucketError as error:
            said.append(str(error))
    assert len(said) == 1, "the byte is one of the parcel of one engine"
    assert "from source 1" in said[0]
    (left,) = [number for number, each in enumerate(fetches) if each.buffer.version == 0]
    file.write_bytes(sound[:-1])
    with pytest.raises(CorruptBucketError, match="another plan"):
        fetches[left].load(5, patience_s=0)
    assert differing(engine[left : left + 1], old[left : left + 1]) == []
    file.write_bytes(sound)
    fetches[left].load(5, patience_s=0)
    assert differing(engine, right) == []
    for post in posts:
        post.remove(5)
    assert list(tmp_path.iterdir()) == []
