"""Who may write most begins first."""

from meshwright.policy.serving.offline_order import longest_first


def test_equals_keep_their_order() -> None:
    assert longest_first([3, 9, 3, 5, 9]) == [1, 4, 3, 0, 2]
    assert longest_first([]) == []
