"""Later sources win field by field, and every value remembers who set it."""

from meshwright.spec.resolve import Source, resolve


def test_later_sources_win() -> None:
    merged = resolve([Source("a", {"tp": 1, "pp": 2}), Source("b", {"tp": 4})])
    assert merged.data == {"tp": 4, "pp": 2}
    assert merged.origins == {"tp": "b", "pp": "a"}


def test_tables_merge_field_by_field() -> None:
    merged = resolve(
        [Source("file", {"layout": {"tp": 1, "pp": 2}}), Source("flag", {"layout": {"pp": 4}})]
    )
    assert merged.data == {"layout": {"tp": 1, "pp": 4}}
    assert merged.origins == {"layout.tp": "file", "layout.pp": "flag"}


def test_a_name_replaces_a_table_and_a_table_a_name() -> None:
    named = resolve([Source("file", {"model": {"hidden": 8}}), Source("flag", {"model": "x"})])
    assert named.data == {"model": "x"}
    assert named.origins == {"model": "flag"}
    written = resolve([Source("file", {"model": "x"}), Source("more", {"model": {"hidden": 8}})])
    assert written.data == {"model": {"hidden": 8}}
    assert written.origins == {"model.hidden": "more"}


def test_a_table_of_another_kind_replaces_the_old_one() -> None:
    merged = resolve(
        [
            Source("a", {"lengths": {"kind": "fixed", "length": 8}}),
            Source("b", {"lengths": {"kind": "uniform", "low": 1}}),
        ]
    )
    assert merged.data == {"lengths": {"kind": "uniform", "low": 1}}


def test_sources_are_left_as_they_were() -> None:
    first = {"layout": {"tp": 1}}
    resolve([Source("a", first), Source("b", {"layout": {"tp": 2}})])
    assert first == {"layout": {"tp": 1}}
