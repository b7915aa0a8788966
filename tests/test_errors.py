"""What can go wrong: problems as text, every one in its error, and the exit codes."""

import pytest

from meshwright.errors import DamagedFile, InputError, MeshwrightError, MissingDependency, Problem


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem("layout.tp", "3 does not divide 8", "use 2"),
         "layout.tp: 3 does not divide 8 (fix: use 2)"),
        (Problem("layout.tp", "3 does not divide 8"), "layout.tp: 3 does not divide 8"),
        (Problem("", "is empty", "write it"), "is empty (fix: write it)"),
    ],
)  # fmt: skip
def test_problem_prints_place_fault_and_fix(problem: Problem, text: str) -> None:
    assert str(problem) == text


def test_input_error_holds_and_prints_every_problem() -> None:
    problems = [Problem("a", "is wrong", "mend it"), Problem("b", "is too")]
    error = InputError(iter(problems))
    assert error.problems == tuple(problems)
    assert str(error) == "a: is wrong (fix: mend it)\nb: is too"


def test_plain_text_is_one_problem_without_a_place() -> None:
    assert InputError("no").problems == (Problem("", "no"),)


def test_input_error_is_a_value_error_too() -> None:
    with pytest.raises(ValueError, match="a: is wrong"):
        raise InputError([Problem("a", "is wrong")])


def test_damaged_file_keeps_what_could_be_read() -> None:
    error = DamagedFile([Problem("trace.csv:3", "is no row")], kept=[1, 2])
    assert error.readable == [1, 2]
    assert error.exit_code == InputError.exit_code


def test_missing_part_carries_a_hint() -> None:
    error = MissingDependency("torch is not installed", "pip install meshwright[train]")
    assert (str(error), error.hint) == ("torch is not installed", "pip install meshwright[train]")


def test_each_kind_of_error_has_its_exit_code() -> None:
    codes = {kind: kind.exit_code for kind in (InputError, DamagedFile, MissingDependency)}
    assert codes == {InputError: 2, DamagedFile: 2, MissingDependency: 3}
    assert all(issubclass(kind, MeshwrightError) for kind in codes)
