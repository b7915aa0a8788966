import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.spec.workload import ClientMix, read_clients

ROWS = "0,2.0,1.0,Gamma,1.0,0.5\n600,0,0,,0,0\n1200,1.0,2.0,Weibull,0.6,0.5\n"
SPANS = {
    "0": {"input_tokens": "{10: 0.5, 30: 0.5}", "output_tokens": "{5: 1.0}"},
    "1200": {"input_tokens": "{7: 1.0}", "output_tokens": "{0: 1.0}"},
}


def write(folder: Path, number: int = 1, rows: str = ROWS, spans: object = SPANS) -> None:
    (folder / f"chunk-{number}-trace.csv").write_text(rows)
    (folder / f"chunk-{number}-dataset.json").write_text(json.dumps(spans))


def test_each_window_holds_as_many_requests_as_its_rate_says(tmp_path: Path) -> None:
    write(tmp_path)
    requests = list(read_clients(tmp_path).generate(1))
    by_window = [sum(int(r.arrival_s // 600) == window for r in requests) for window in range(3)]
    assert by_window == [1200, 0, 600]


def test_lengths_follow_the_histogram_of_their_span(tmp_path: Path) -> None:
    write(tmp_path)
    requests = list(read_clients(tmp_path).generate(1))
    early = [r for r in requests if r.arrival_s < 1200]
    late = [r for r in requests if r.arrival_s >= 1200]
    assert {r.prompt_tokens for r in early} == {10, 30}
    assert {(r.prompt_tokens, r.output_tokens) for r in late} == {(7, 0)}


def test_clients_are_merged_in_order_of_arrival(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 12)
    clients = read_clients(tmp_path)
    assert [client.name for client in clients.clients] == ["chunk-1", "chunk-12"]
    assert clients.rate_per_s(0) == 4.0
    times = [request.arrival_s for request in clients.generate(1)]
    assert len(times) == 2 * 1800
    assert times == sorted(times)


def test_the_same_seed_draws_the_same_requests(tmp_path: Path) -> None:
    write(tmp_path)
    clients = read_clients(tmp_path)
    assert list(clients.generate(5)) == list(clients.generate(5))
    assert list(clients.generate(5)) != list(clients.generate(6))


def test_looking_from_a_later_moment_shows_the_same_requests(tmp_path: Path) -> None:
    write(tmp_path)
    clients = read_clients(tmp_path)
    later = [(r.arrival_s + 300, r.prompt_tokens) for r in clients.generate(1, 300, 100)]
    every = [
        (r.arrival_s, r.prompt_tokens) for r in clients.generate(1) if 300 <= r.arrival_s < 400
    ]
    assert [prompt for _, prompt in later] == [prompt for _, prompt in every]
    assert [time for time, _ in later] == pytest.approx([time for time, _ in every])


def test_gaps_vary_as_the_family_says(tmp_path: Path) -> None:
    # A Weibull distribution of shape 0.6 has a coefficient of variation of 1.758.
    write(tmp_path, rows="0,60,1.7,Weibull,0.6,1\n")
    times = [request.arrival_s for request in read_clients(tmp_path).generate(1)]
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    cv = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean
    assert cv == pytest.approx(1.758, rel=0.05)


def test_a_multimodal_prompt_adds_the_tokens_of_every_item(tmp_path: Path) -> None:
    spans = {
        "0": {
            "text_tokens": "{100: 1.0}",
            "image_tokens": "{10: 1.0}",
            "image_count": "{0: 0.5, 3: 0.5}",
            "audio_tokens": "{0: 1.0}",
            "audio_count": "{0: 1.0}",
            "output_tokens": "{5: 1.0}",
        }
    }
    write(tmp_path, spans=spans)
    clients = read_clients(tmp_path)
    assert len(clients.clients[0].lengths_over_time[0].prompt_items) == 1
    assert {request.prompt_tokens for request in clients.generate(1)} == {100, 130}


def test_one_client_is_read_by_its_trace_file(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    clients = read_clients(tmp_path / "chunk-2-trace.csv")
    assert [client.name for client in clients.clients] == ["chunk-2"]


def test_clients_without_lengths_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2, spans={"0": {"input_tokens": "{}", "output_tokens": "{}"}})
    (tmp_path / "chunk-3-trace.csv").write_text(ROWS)
    assert [client.name for client in read_clients(tmp_path).clients] == ["chunk-1"]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("0,1.0,1.0,Pareto,1,1\n", "'Pareto' is not one of Gamma, Weibull"),
        ("0,1.0\n", "is not start,rate"),
        ("0,fast,1.0,Gamma,1,1\n", "fast"),
        ("0,-1,1.0,Gamma,1,1\n", "rate"),
        ("0,1,1.0,Gamma,nan,1\n", "shape"),
        ("600,1,1,Gamma,1,1\n0,1,1,Gamma,1,1\n", "sort the rows"),
        ("", "holds no windows"),
    ],
)
def test_a_damaged_trace_is_named_and_the_other_clients_kept(
    tmp_path: Path, rows: str, says: str
) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2, rows=rows)
    with pytest.raises(DamagedFile, match=says) as caught:
        read_clients(tmp_path)
    assert "chunk-2-trace.csv" in str(caught.value)
    assert isinstance(caught.value.readable, ClientMix)
    assert [client.name for client in caught.value.readable.clients] == ["chunk-1"]


@pytest.mark.parametrize(
    "spans",
    [
        [],
        {"0": 3},
        {"zero": SPANS["0"]},
        {"0": {"input_tokens": "{10: 1.0}"}},
        {"0": {"input_tokens": "{ten: 1.0}", "output_tokens": "{5: 1.0}"}},
        {"0": {"input_tokens": "{10: -1.0}", "output_tokens": "{5: 1.0}"}},
        {"0": {"input_tokens": 5, "output_tokens": "{5: 1.0}"}},
    ],
)
def test_damaged_lengths_are_named(tmp_path: Path, spans: object) -> None:
    write(tmp_path, spans=spans)
    with pytest.raises(DamagedFile, match=r"chunk-1-dataset\.json"):
        read_clients(tmp_path)


def test_broken_json_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "chunk-1-dataset.json").write_text('{"0": ')
    with pytest.raises(DamagedFile, match="is not valid JSON"):
        read_clients(tmp_path)


def test_a_folder_without_clients_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"chunk-N-trace\.csv"):
        read_clients(tmp_path)


def problems_of(folder: Path) -> tuple[Problem, ...]:
    try:
        read_clients(folder)
    except InputError as error:
        return error.problems
    return ()


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_client_models_are_read_or_refused_with_a_fix(
    tmp_path: Path, data: st.DataObject
) -> None:
    texts = {"chunk-1-trace.csv": ROWS, "chunk-1-dataset.json": json.dumps(SPANS)}
    for name, text in texts.items():
        letters = list(text)
        for _ in range(data.draw(st.integers(0, 4))):
            at = data.draw(st.integers(0, len(letters) - 1))
            letters[at] = data.draw(st.sampled_from(list('",:{}[]\n\r\x00-e9anif ')))
        (tmp_path / name).write_text("".join(letters))
    problems = problems_of(tmp_path)
    assert all(str(tmp_path) in p.where and p.what and p.fix for p in problems)


def test_an_overlong_row_is_refused(tmp_path: Path) -> None:
    write(tmp_path, rows='"' + "9" * 200_000)
    assert [problem.where for problem in problems_of(tmp_path)]
