"""The documentation of fields, and the pages that list them."""

import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from meshwright.spec.cluster import Cluster
from meshwright.spec.field_docs import list_field_docs
from meshwright.spec.layout import Layout
from meshwright.spec.model import LatentAttentionSpec, Model
from meshwright.spec.workload import ServingWorkload, TrainingWorkload

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide"
PAGES = {
    "models.md": (Model,),
    "clusters.md": (Cluster,),
    "workloads.md": (TrainingWorkload, ServingWorkload),
}


def reached(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """Yield every struct that a value of this type can hold, itself included."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
        for field in msgspec.structs.fields(kind):
            yield from reached(field.type)
    elif kind is not types.NoneType:
        for inner in get_args(kind):
            yield from reached(inner)


STRUCTS = sorted(
    {
        struct
        for top in (Model, Cluster, TrainingWorkload, ServingWorkload, Layout)
        for struct in reached(top)
    },
    key=lambda struct: struct.__name__,
)


def test_fields_come_in_order_with_type_default_and_meaning() -> None:
    by_name = {field.name: field for field in list_field_docs(LatentAttentionSpec)}
    assert tuple(by_name) == LatentAttentionSpec.__struct_fields__
    assert by_name["heads"].kind is int
    assert by_name["heads"].default is msgspec.NODEFAULT
    assert by_name["bias"].default is False
    assert by_name["kv_rank"].doc == "Width of the latent that stands for keys and values."


def test_meaning_over_several_lines_becomes_one() -> None:
    doc = next(field.doc for field in list_field_docs(TrainingWorkload) if field.name == "packing")
    assert "\n" not in doc
    assert "  " not in doc
    assert doc.startswith("How documents fill a sequence:")


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_every_field_of_the_spec_says_what_it_means(struct: type[msgspec.Struct]) -> None:
    assert [field.name for field in list_field_docs(struct) if not field.doc] == []


@pytest.mark.parametrize("page", PAGES)
def test_page_lists_the_fields_of_every_table_that_its_files_may_hold(page: str) -> None:
    text = (GUIDE / page).read_text(encoding="utf-8")
    listed = set(re.findall(r"^```\{fields\} [\w.]+:(\w+)$", text, re.MULTILINE))
    assert listed == {struct.__name__ for top in PAGES[page] for struct in reached(top)}
