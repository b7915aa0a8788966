"""The page on findings shows the registry and the last measurement."""

from validation.findings.page import PAGE, renewed
from validation.findings.run import read_result


def test_the_page_is_as_the_patterns_and_the_last_result_make_it() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert renewed(text, read_result()) == text


def test_precision_and_recall_stay_high() -> None:
    result = read_result()
    for rows in (result.labelled, result.planted, result.simulated):
        true, false, missed = (
            sum(getattr(row.score, name) for row in rows) for name in ("true", "false", "missed")
        )
        assert true >= 0.95 * (true + false)
        assert true >= 0.95 * (true + missed)
