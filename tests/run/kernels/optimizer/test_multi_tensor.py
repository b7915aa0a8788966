"""A list of tensors is cut into chunks that cover every element once, and keeps its tables."""

import pytest

pytest.importorskip("torch", reason="the list holds torch tensors")

import torch

from meshwright.errors import InputError
from meshwright.run.kernels.optimizer.multi_tensor import DTYPE_CODES, MIXED_DTYPES, TensorList
from tests.run.kernels.exactness import DEVICE, drawn


def test_chunks_cover_every_element_once() -> None:
    listed = TensorList.from_tensors([drawn(n) for n in (70, 0, 64, 1)], chunk_elements=32)
    chunks = listed.chunks
    covered = [
        (tensor, element)
        for tensor, start, length in zip(*(table.tolist() for table in chunks.tables), strict=True)
        for element in range(start, start + length)
    ]
    assert covered == [(which, n) for which, size in enumerate((70, 0, 64, 1)) for n in range(size)]
    assert chunks.num_chunks == 3 + 0 + 2 + 1


def test_addresses_and_kinds_are_those_of_the_tensors() -> None:
    tensors = [drawn(4), drawn(4, dtype=torch.bfloat16), drawn(4, dtype=torch.float16)]
    listed = TensorList.from_tensors(tensors)
    assert listed.addresses.tolist() == [each.data_ptr() for each in tensors]
    assert listed.dtype_codes.tolist() == [DTYPE_CODES[each.dtype] for each in tensors]
    assert listed.common_dtype_code == MIXED_DTYPES
    assert TensorList.from_tensors(tensors[:1]).common_dtype_code == DTYPE_CODES[torch.float32]


def test_a_tensor_that_begins_between_16_bytes_is_noticed() -> None:
    whole = drawn(64)
    assert TensorList.from_tensors([whole, whole[4:]]).is_aligned
    assert not TensorList.from_tensors([whole, whole[3:]]).is_aligned


def test_lists_alongside_share_their_chunks() -> None:
    params = TensorList.from_tensors([drawn(5, 3), drawn(7)])
    grads = params.with_chunks_of([drawn(5, 3, dtype=torch.bfloat16), drawn(7)])
    assert grads.chunks is params.chunks
    assert grads.common_dtype_code == MIXED_DTYPES


def test_tables_are_renewed_only_for_other_tensors() -> None:
    tensors = [drawn(5), drawn(7)]
    listed = TensorList.from_tensors(tensors)
    assert listed.repoint([each.detach() for each in tensors]) is listed
    moved = listed.repoint([tensors[0], drawn(7, seed=1)])
    assert moved is not listed
    assert moved.chunks is listed.chunks


def test_dense_tensors_in_any_order_are_taken() -> None:
    transposed = drawn(4, 6).t()
    listed = TensorList.from_tensors([transposed])
    assert listed.with_chunks_of([drawn(4, 6, seed=1).t()]).chunks is listed.chunks
    with pytest.raises(InputError, match="strides"):
        listed.with_chunks_of([drawn(6, 4)])


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(InputError) as caught:
        TensorList.from_tensors(
            [drawn(4), drawn(8)[::2], torch.zeros(3, dtype=torch.int64, device=DEVICE)],
            chunk_elements=100,
        )
    assert [problem.where for problem in caught.value.problems] == [
        "tensors[1]",
        "tensors[2]",
        "chunk_elements",
    ]


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(InputError, match="the list is empty"):
        TensorList.from_tensors([])


def test_another_number_of_tensors_is_refused() -> None:
    with pytest.raises(InputError, match="1 tensors beside a list of 2"):
        TensorList.from_tensors([drawn(4), drawn(5)]).with_chunks_of([drawn(4)])
