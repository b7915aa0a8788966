"""Settings of the data: read from a file, refused with a fix."""

import pytest

from meshwright.errors import InputError
from meshwright.run.train.data import DataSettings, Source
from meshwright.run.train.data.settings import as_sources
from meshwright.spec.read import plain, read


def test_a_path_alone_is_a_source() -> None:
    given = {"sources": ["a", {"path": "b"}], "validation": 0.01}
    settings = read(DataSettings, given, "data")
    assert as_sources(settings.sources) == (Source(path="a"), Source(path="b"))
    assert read(DataSettings, plain(settings)) == settings


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"sources": []}, "data.sources"),
        ({}, "data.sources"),
        ({"sources": [{"path": "a", "weight": 0}]}, "data.sources[0].weight"),
        ({"sources": [{"path": "a", "weight": 1}, "b"]}, "data.sources[1].weight"),
        ({"sources": ["a", ""]}, "data.sources[1]"),
        ({"sources": ["a"], "validation": 0.9}, "data.validation"),
        ({"sources": ["a"], "validation": 0.1, "validation_sources": ["b"]}, "data.validation"),
        ({"sources": ["a"], "workers": 0}, "data.workers"),
        ({"sources": ["a"], "sufffle": True}, "data.sufffle"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, object], where: str) -> None:
    with pytest.raises(InputError) as refused:
        read(DataSettings, given, "data")
    assert where in {problem.where for problem in refused.value.problems}
