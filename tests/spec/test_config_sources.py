"""Later sources win field by field, and every value remembers who set it."""

from meshwright.spec.config_sources import ConfigSource, merge_sources


def test_later_sources_win() -> None:
    merged = merge_sources([ConfigSource("a", {"tp": 1, "pp": 2}), ConfigSource("b", {"tp": 4})])
    assert merged.data == {"tp": 4, "pp": 2}
    assert merged.origins == {"tp": "b", "pp": "a"}


def test_tables_merge_field_by_field() -> None:
    merged = merge_sources(
        [
            ConfigSource("file", {"layout": {"tp": 1, "pp": 2}}),
            ConfigSource("flag", {"layout": {"pp": 4}}),
        ]
    )
    assert merged.data == {"layout": {"tp": 1, "pp": 4}}
    assert merged.origins == {"layout.tp": "file", "layout.pp": "flag"}


def test_a_name_replaces_a_table_and_a_table_a_name() -> None:
    named = merge_sources(
        [ConfigSource("file", {"model": {"hidden": 8}}), ConfigSource("flag", {"model": "x"})]
    )
    assert named.data == {"model": "x"}
    assert named.origins == {"model": "flag"}
    written = merge_sources(
        [ConfigSource("file", {"model": "x"}), ConfigSource("more", {"model": {"hidden": 8}})]
    )
    assert written.data == {"model": {"hidden": 8}}
    assert written.origins == {"model.hidden": "more"}


def test_a_table_of_another_kind_replaces_the_old_one() -> None:
    merged = merge_sources(
        [
            ConfigSource("a", {"lengths": {"kind": "fixed", "length": 8}}),
            ConfigSource("b", {"lengths": {"kind": "uniform", "low": 1}}),
        ]
    )
    assert merged.data == {"lengths": {"kind": "uniform", "low": 1}}


def test_sources_are_left_as_they_were() -> None:
    first = {"layout": {"tp": 1}}
    merge_sources([ConfigSource("a", first), ConfigSource("b", {"layout": {"tp": 2}})])
    assert first == {"layout": {"tp": 1}}
