"""Buckets are filled backwards, aligned, and cut into equal parts."""

import pytest

pytest.importorskip("torch", reason="buckets name torch's formats")

import torch

from meshwright.run.parallel.zero.buckets import (
    BucketRequest,
    GradientBucket,
    fill_buckets,
    list_pieces_in_range,
)

FP32, BF16 = torch.float32, torch.bfloat16


def names(buckets: list[GradientBucket]) -> list[list[str]]:
    return [[member.name for member in bucket.members] for bucket in buckets]


def filled(wanted: list[BucketRequest], **given: object) -> list[GradientBucket]:
    chosen = {"parts": 2, "expert_parts": 1, "element_bytes": 4, "bucket_bytes": 4000, **given}
    return fill_buckets(wanted, **chosen)  # type: ignore[arg-type]


def test_what_is_used_last_comes_first() -> None:
    wanted = [BucketRequest(name, 600, FP32) for name in "abcd"]
    assert names(filled(wanted)) == [["d", "c"], ["b", "a"]]


def test_a_bucket_has_one_format_one_kind_of_replicas_and_one_set_of_passes() -> None:
    wanted = [
        BucketRequest("a", 10, FP32),
        BucketRequest("b", 10, BF16),
        BucketRequest("c", 10, FP32, is_expert=True),
        BucketRequest("d", 10, FP32, chunks=frozenset({1})),
    ]
    assert names(filled(wanted)) == [["d"], ["c"], ["b"], ["a"]]


def test_a_bucket_leaves_in_the_order_of_its_last_parameter() -> None:
    wanted = [
        BucketRequest("a", 10, FP32),
        BucketRequest("b", 999, BF16),
        BucketRequest("c", 10, FP32),
    ]
    assert names(filled(wanted)) == [["b"], ["c", "a"]]


def test_what_other_stages_hold_too_comes_last() -> None:
    wanted = [
        BucketRequest("a", 10, FP32),
        BucketRequest("b", 10, FP32, shared_stage_group="embedding"),
    ]
    assert names(filled(wanted)) == [["a"], ["b"]]


def test_units_are_buckets_of_any_size() -> None:
    wanted = [
        BucketRequest("a", 9000, FP32, fsdp_unit="x"),
        BucketRequest("b", 9000, FP32, fsdp_unit="x"),
    ]
    wanted += [BucketRequest("c", 10, FP32, fsdp_unit="y")]
    assert names(filled(wanted, by_unit=True)) == [["c"], ["b", "a"]]


def test_parts_of_sums_lie_side_by_side() -> None:
    wanted = [BucketRequest("a", 10, FP32, grad_sum_group="tp"), BucketRequest("b", 10, FP32)]
    wanted += [BucketRequest("c", 300, FP32, grad_sum_group="tp")]
    (bucket,) = filled(wanted)
    assert names([bucket]) == [["b", "c", "a"]]
    assert bucket.partial_sum_slices == (("tp", 256, 1024),)


def test_parameters_and_parts_begin_at_blocks_of_256() -> None:
    (bucket,) = filled([BucketRequest("a", 300, FP32), BucketRequest("b", 1, FP32)], parts=3)
    assert [(each.name, each.start) for each in bucket.members] == [("b", 0), ("a", 256)]
    assert bucket.elements == 768
    (bucket,) = filled([BucketRequest("a", 600, FP32)], parts=2)
    assert bucket.elements == 1024


def test_a_rank_has_pieces_of_what_its_part_meets() -> None:
    (bucket,) = filled([BucketRequest("a", 600, FP32), BucketRequest("b", 100, FP32)], parts=2)
    assert list_pieces_in_range(bucket.members, 0, 512) == [("b", 0, 0, 100), ("a", 256, 0, 256)]
    assert list_pieces_in_range(bucket.members, 512, 1024) == [("a", 0, 256, 600)]
