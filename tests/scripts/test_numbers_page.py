"""The page of numbers: what it shows of the results."""

from benchmarks.machine import Machine
from benchmarks.result import Figure, Measured, Result
from scripts.numbers_page import page


def _result(date: str, value: float, *, target: str = "", cpu: str = "Some CPU") -> Result:
    machine = Machine(
        cpu=cpu, cores=2, memory_bytes=2**34, system="Linux 6", python="CPython 3", packages={}
    )
    return Result(
        name="speed",
        question="How fast?",
        date=date,
        wall_s=1.0,
        peak_memory_bytes=2**30,
        machine=machine,
        measured=Measured(figures=(Figure(name="a|b", value=value, unit="s", target=target),)),
    )


def test_an_empty_folder_says_so() -> None:
    assert "Nothing has been measured yet." in page([])


def test_a_missed_target_is_said() -> None:
    assert "| a\\|b | 20 | s | < 15 | **no** |" in page([_result("2026-01-01", 20, target="< 15")])


def test_the_newest_result_stands_beside_the_one_before() -> None:
    text = page([_result("2026-01-01", 5), _result("2026-02-01", 4)])
    assert "| what | value | unit | target | met | 2026-01-01 |" in text
    assert "| a\\|b | 4 | s |  |  | 5 |" in text


def test_results_of_another_machine_are_not_compared() -> None:
    text = page([_result("2026-01-01", 5, cpu="Other CPU"), _result("2026-02-01", 4)])
    assert "2026-01-01" not in text
