"""The benchmark runner: which modules it finds, and what it does when one fails."""

from pathlib import Path

from benchmarks.run import HERE, Benchmark, discover, run_in_child


def test_a_module_with_the_three_names_is_a_benchmark(tmp_path: Path) -> None:
    (tmp_path / "speed.py").write_text(
        'import does_not_exist\nNAME = "speed"\nQUESTION = "How fast?"\ndef measure(quick): ...\n'
    )
    (tmp_path / "aside.py").write_text('NAME = "aside"\nQUESTION = "No measure?"\n')
    assert discover(tmp_path) == [Benchmark("speed", "How fast?", f"{tmp_path.name}.speed")]


def test_names_of_benchmarks_are_unique() -> None:
    names = [benchmark.name for benchmark in discover(HERE)]
    assert len(names) == len(set(names))


def test_a_benchmark_that_fails_gives_no_report() -> None:
    absent = Benchmark("absent", "Is it there?", "benchmarks.not_there")
    assert run_in_child(absent, quick=True) is None
