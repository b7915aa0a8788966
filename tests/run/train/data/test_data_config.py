"""Settings of the data: read from a file, refused with a fix."""

import pytest

from meshwright.errors import InputError
from meshwright.run.train.data import DataConfig, DataSource
from meshwright.run.train.data.data_config import normalize_sources
from meshwright.spec.serialization import decode, encode


def test_a_path_alone_is_a_source() -> None:
    given = {"sources": ["a", {"path": "b"}], "validation_fraction": 0.01}
    settings = decode(DataConfig, given, "data")
    assert normalize_sources(settings.sources) == (DataSource(path="a"), DataSource(path="b"))
    assert decode(DataConfig, encode(settings)) == settings


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"sources": []}, "data.sources"),
        ({}, "data.sources"),
        ({"sources": [{"path": "a", "weight": 0}]}, "data.sources[0].weight"),
        ({"sources": [{"path": "a", "weight": 1}, "b"]}, "data.sources[1].weight"),
        ({"sources": ["a", ""]}, "data.sources[1]"),
        ({"sources": ["a"], "validation_fraction": 0.9}, "data.validation_fraction"),
        (
            {"sources": ["a"], "validation_fraction": 0.1, "validation_sources": ["b"]},
            "data.validation_fraction",
        ),
        ({"sources": ["a"], "num_workers": 0}, "data.num_workers"),
        ({"sources": ["a"], "sufffle": True}, "data.sufffle"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, object], where: str) -> None:
    with pytest.raises(InputError) as refused:
        decode(DataConfig, given, "data")
    assert where in {problem.where for problem in refused.value.problems}
