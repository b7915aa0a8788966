"""The real request traces, where they are at hand: figures known from their own descriptions."""

from pathlib import Path

import pytest

from meshwright.spec.workload import RequestTrace, read_clients, read_requests, summarize_trace

SHARED = Path(__file__).resolve().parents[3] / ".." / "shared" / "request_traces"

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not SHARED.is_dir(), reason="the shared request traces are not here"),
]


# Rows, seconds and mean lengths as the traces' own descriptions give them; None is not given.
@pytest.mark.parametrize(
    ("name", "rows", "seconds", "prompt", "output"),
    [
        ("azure_llm_2023/AzureLLMInferenceTrace_code.csv", 8819, None, None, None),
        ("azure_llm_2023/AzureLLMInferenceTrace_conv.csv", 19366, None, None, None),
        ("vidur/splitwise_code.csv", 8819, None, None, None),
        ("vidur/splitwise_conv.csv", 19366, None, None, None),
        ("mooncake/conversation_trace.jsonl", 12031, 3537, 12035, 343),
        ("mooncake/synthetic_trace.jsonl", 3993, 1022, 15325, 149),
        ("mooncake/mooncake_trace_1000.jsonl", 1000, 177, 9792, 199),
    ],
)
def test_figures_equal_the_description_of_the_trace(
    name: str, rows: int, seconds: int | None, prompt: int | None, output: int | None
) -> None:
    summary = summarize_trace(read_requests(SHARED / name))
    assert summary.requests == rows
    assert summary.duration_s is not None
    if seconds is not None:
        assert round(summary.duration_s) == seconds
        assert (round(summary.prompt.mean), round(summary.output.mean)) == (prompt, output)


def test_a_trace_of_lengths_only_has_no_rate() -> None:
    path = SHARED / "vidur" / "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv"
    summary = summarize_trace(read_requests(path))
    assert summary.requests == 28257
    assert summary.rate_per_s is None


@pytest.mark.parametrize("kind", ["code", "conv"])
def test_azure_and_vidur_tell_the_same_requests(kind: str) -> None:
    azure = read_requests(SHARED / "azure_llm_2023" / f"AzureLLMInferenceTrace_{kind}.csv")
    vidur = read_requests(SHARED / "vidur" / f"splitwise_{kind}.csv")
    for one, other in zip(azure.requests, vidur.requests, strict=True):
        assert one.arrival_s == pytest.approx(other.arrival_s, abs=1e-6)
        assert one.prompt_tokens == other.prompt_tokens
        assert one.output_tokens == other.output_tokens


# Shares of blocks that an endless cache would hold, as described with the traces.
@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("conversation_trace", 0.366),
        ("synthetic_trace", 0.640),
        ("mooncake_trace_1000", 0.380),
    ],
)
def test_prefix_reuse_is_near_the_described_share_of_blocks(name: str, share: float) -> None:
    trace = read_requests(SHARED / "mooncake" / f"{name}.jsonl")
    seen: set[int] = set()
    hits = blocks = 0
    for request in trace.requests:
        hits += sum(block in seen for block in request.prefix_blocks)
        blocks += len(request.prefix_blocks)
        seen.update(request.prefix_blocks)
    assert hits / blocks == pytest.approx(share, abs=0.001)
    # Tokens instead of blocks: a last block that is partly filled weighs less.
    assert summarize_trace(trace).prefix_reuse_share == pytest.approx(share, abs=0.015)


@pytest.mark.parametrize(
    ("folder", "clients"),
    [("language/m-small", 4), ("multimodal/mm-image", 6), ("reason/deepseek-r1", 6)],
)
def test_clients_are_drawn_at_the_rate_they_were_measured_at(folder: str, clients: int) -> None:
    mix = read_clients(SHARED / "servegen" / folder)
    assert len(mix.clients) == clients
    start_s = 48_000.0  # a window starts here, in the busy part of the day
    drawn = RequestTrace(requests=tuple(mix.generate(1, start_s, 600.0)))
    assert len(drawn.requests) / 600 == pytest.approx(mix.rate_per_s(start_s), rel=0.01)
    prompt = summarize_trace(drawn).prompt.mean
    means = [
        (client, habit)
        for client in mix.clients
        for habit in client.lengths_over_time
        if habit.start_s == 43_200
    ]
    weights = {
        client.name: next(w.rate_per_s for w in client.windows if w.start_s == start_s)
        for client, _ in means
    }
    expected = sum(
        weights[client.name]
        * (habit.prompt.mean() + sum(p.count.mean() * p.tokens.mean() for p in habit.prompt_items))
        for client, habit in means
    ) / sum(weights.values())
    assert prompt == pytest.approx(expected, rel=0.05)
