"""Where boxes of tensors lie in a file."""

from pathlib import Path

from safetensors import safe_open

from meshwright.run.train.checkpoint.metadata import DTYPE_BYTES
from meshwright.run.train.checkpoint.safetensors_layout import WrittenBox, make_safetensors_layout

WHOLE = WrittenBox("a.weight", "F32", (2, 3), (0, 0), (2, 3))
PART = WrittenBox("embedding", "BF16", (8, 3), (4, 0), (4, 3))
BYTES = WrittenBox("mask", "BOOL", (5,), (0,), (5,))


def test_a_file_opens_as_safetensors(tmp_path: Path) -> None:
    image = make_safetensors_layout(3, [BYTES, PART, WHOLE])
    path = tmp_path / image.name
    path.write_bytes(image.header + bytes(image.data_bytes))
    with safe_open(path, framework="pt") as opened:
        assert sorted(opened.keys()) == ["a.weight", "embedding[4:8,0:3]", "mask"]
        assert opened.get_slice("embedding[4:8,0:3]").get_shape() == [4, 3]


def test_boxes_lie_without_gaps_each_at_a_multiple_of_its_element() -> None:
    image = make_safetensors_layout(0, [BYTES, PART, WHOLE])
    ends = [len(image.header)]
    for box, start in zip(image.written_boxes, image.starts, strict=True):
        assert start == ends[-1]
        assert start % DTYPE_BYTES[box.dtype] == 0
        ends.append(start + box.size_bytes)
    assert ends[-1] == len(image.header) + image.data_bytes


def test_the_same_boxes_give_the_same_file() -> None:
    assert make_safetensors_layout(0, [BYTES, PART, WHOLE]) == make_safetensors_layout(
        0, [WHOLE, BYTES, PART]
    )
