"""What a machine says of itself."""

import os

import pytest

from meshwright.observe.hardware import machine


@pytest.mark.parametrize(
    ("load", "needed", "said"),
    [(0.4, 4, ""), (1.5, 2, ""), (2.5, 2, "load 2.5"), (0.6, 4, "load 0.6")],
)
def test_other_programs_are_told_where_they_leave_too_few_cores(
    monkeypatch: pytest.MonkeyPatch, load: float, needed: int, said: str
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 9.0, 9.0), raising=False)
    monkeypatch.setattr(machine, "count_cores", lambda: 4)
    found = machine.describe_other_load(needed)
    assert (said in found) if said else not found
