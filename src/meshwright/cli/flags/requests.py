"""Flags that describe requests to serve, and the streams of requests that they stand for."""

import argparse
from collections.abc import Callable, Iterator
from itertools import islice, takewhile
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec.field_checks import check_integer, check_number, raise_problems
from meshwright.spec.units import format_quantity, parse_count, parse_number, parse_seconds
from meshwright.spec.workload import (
    Arrivals,
    ConstantArrivals,
    FixedConcurrency,
    FixedLength,
    GammaArrivals,
    Lengths,
    LogNormalLength,
    PoissonArrivals,
    PrefixSharing,
    RequestTrace,
    ServingWorkload,
    UniformLength,
    WorkloadRequest,
    load_workload,
    read_clients,
    read_requests,
)

DEFAULT_PROMPT_LENGTH, DEFAULT_OUTPUT_LENGTH, DEFAULT_NUM_REQUESTS = "512", "128", 200
UNLIMITED_RATE_PER_S = 1e9
"""Requests per second that stand for all of them at the start."""
_ENDLESS = 10**7
"""More requests than a closed loop sends before its time is up."""


class RequestStream(NamedTuple):
    """Requests with a pace."""

    name: str
    generate: Callable[[], Iterator[WorkloadRequest]]
    """Returns the requests, the same ones every time."""
    rate_per_s: float | None = None
    concurrency: int | None = None
    """Requests that are open at a time, whatever their arrival times; None keeps to these."""


def add_request_flags(
    parser: argparse.ArgumentParser, *, count: int = DEFAULT_NUM_REQUESTS, one_rate: bool = False
) -> None:
    """Add the flags; help says that there are `count` requests where nobody says how many.

    A command that takes one stream which arrives by itself has `one_rate`.
    """
    what = parser.add_argument_group("requests")
    lengths = "N, LOW-HIGH, or lognormal:MEDIAN:SIGMA"
    what.add_argument(
        "--prompt",
        metavar="TOKENS",
        help=f"tokens of prompts: {lengths} (default: {DEFAULT_PROMPT_LENGTH})",
    )
    what.add_argument(
        "--output",
        metavar="TOKENS",
        help=f"tokens of answers, likewise (default: {DEFAULT_OUTPUT_LENGTH})",
    )
    what.add_argument(
        "--prefix", metavar="GROUPS:TOKENS",
        help="prompts begin with one of GROUPS shared texts of so many tokens, which count",
    )  # fmt: skip
    what.add_argument(
        "--trace",
        metavar="FILE",
        help="recorded requests, CSV or JSON lines, or a folder of clients",
    )
    what.add_argument("--workload", metavar="FILE", help="requests as a TOML file describes them")
    what.add_argument("--seed", default="0", metavar="N", help="draws lengths, times and prompts")
    pace = parser.add_argument_group("pace")
    several = "requests per second, or inf for all at once; several run one after another"
    pace.add_argument(
        "--rate", metavar="N" if one_rate else "N,…",
        help="requests per second" if one_rate else several,
    )  # fmt: skip
    pace.add_argument(
        "--arrivals", metavar="KIND", help="poisson (default), constant, or gamma:CV for bursts"
    )
    pace.add_argument(
        "--concurrency",
        metavar="N,…",
        help=argparse.SUPPRESS
        if one_rate
        else "keep N in flight instead (default: 1); several run one after another",
    )
    pace.add_argument(
        "--arrival-scale", metavar="X", help="replay a trace X times as fast as it was recorded"
    )
    pace.add_argument(
        "--requests", metavar="N", help=f"how many (default: {count:,}, or the whole trace)"
    )
    pace.add_argument("--duration", metavar="TIME", help="send for so long, such as 60s")


def read_streams(args: argparse.Namespace) -> list[RequestStream]:
    """Return the streams that the flags describe; rates or concurrencies make several."""
    _refuse_clashes(args)
    count = None if args.requests is None else parse_count(args.requests, "--requests")
    duration_s = None if args.duration is None else parse_seconds(args.duration, "--duration")
    if count is not None:
        raise_problems(check_integer("--requests", count, most=_ENDLESS))
    if duration_s is not None:
        raise_problems(check_number("--duration", duration_s, 1e-3, 1e7))
    paces: list[tuple[float | None, int | None]] = [(None, None)]
    if args.rate is not None:
        paces = [(_rate(word), None) for word in _listed(args.rate, "--rate")]
    elif args.concurrency is not None:
        paces = [(None, _in_flight(word)) for word in _listed(args.concurrency, "--concurrency")]
    if args.trace is not None:
        trace = _scaled(_recorded(args, count, duration_s), args)
        return [_replayed(trace, pace, count, duration_s, args) for pace in paces]
    if count is None and duration_s is None:
        count = DEFAULT_NUM_REQUESTS
    return [_drawn(_described(args), pace, count, duration_s, args) for pace in paces]


def _refuse_clashes(args: argparse.Namespace) -> None:
    problems = []
    for one, other in (
        ("rate", "concurrency"), ("arrivals", "concurrency"), ("trace", "workload"),
        ("arrival_scale", "rate"), ("arrival_scale", "concurrency"),
        ("trace", "prompt"), ("trace", "output"),
        ("trace", "prefix"), ("workload", "prompt"), ("workload", "output"), ("workload", "prefix"),
    ):  # fmt: skip
        if getattr(args, one) is not None and getattr(args, other) is not None:
            flag = f"--{one.replace('_', '-')}"
            what = f"says the same thing as {flag} in another way"
            problems.append(Problem(f"--{other}", what, f"give {flag} or --{other}"))
    if args.arrival_scale is not None and args.trace is None:
        problems.append(Problem("--arrival-scale", "replays a trace", "name one with --trace"))
    raise_problems(problems)


def _described(args: argparse.Namespace) -> ServingWorkload:
    """Return the requests as far as the pace leaves them alone."""
    if args.workload is not None:
        found = load_workload(args.workload)
        if not isinstance(found, ServingWorkload):
            what = "describes a training run, not requests"
            raise InputError([Problem(args.workload, what, 'write kind = "requests"')])
        return found
    prompt = parse_lengths(args.prompt or DEFAULT_PROMPT_LENGTH, "--prompt")
    prefix = None if args.prefix is None else _prefix(args.prefix)
    if prefix is not None:
        _require_longer(prompt, prefix.tokens)
    return ServingWorkload(
        arrival=FixedConcurrency(in_flight=1),
        prompt=prompt,
        output=parse_lengths(args.output or DEFAULT_OUTPUT_LENGTH, "--output"),
        prefix=prefix,
    )


def _require_longer(prompt: Lengths, shared: Lengths) -> None:
    """Raise where no prompt is as long as what it is to begin with."""
    if not (
        isinstance(prompt, FixedLength | UniformLength)
        and isinstance(shared, FixedLength | UniformLength)
    ):
        return
    longest = prompt.high if isinstance(prompt, UniformLength) else prompt.tokens
    shortest = shared.low if isinstance(shared, UniformLength) else shared.tokens
    if shortest > longest:
        what = f"texts of {shortest:,} tokens are longer than the prompts, which have {longest:,}"
        fix = f"use --prompt {shortest + longest}: the shared text counts"
        raise InputError([Problem("--prefix", what, fix)])


def _drawn(
    requests: ServingWorkload,
    pace: tuple[float | None, int | None],
    count: int | None,
    duration_s: float | None,
    args: argparse.Namespace,
) -> RequestStream:
    rate, in_flight = pace
    if rate is not None:
        requests = msgspec.structs.replace(requests, arrival=_arrivals(rate, args.arrivals))
    elif in_flight is not None:
        requests = msgspec.structs.replace(requests, arrival=FixedConcurrency(in_flight=in_flight))
    arrival, seed = requests.arrival, read_seed(args)
    if isinstance(arrival, FixedConcurrency):
        most = _ENDLESS if count is None else count
        name = f"{arrival.in_flight} at a time"
        return RequestStream(name, lambda: requests.generate(seed, most), None, arrival.in_flight)
    rate = requests.rate_per_s
    if rate == UNLIMITED_RATE_PER_S and count is None:
        fix = "give --requests, and leave out --duration"
        raise InputError([Problem("--rate", "all at once has no end", fix)])
    return RequestStream(_rate_name(rate), lambda: requests.generate(seed, count, duration_s), rate)


def _recorded(
    args: argparse.Namespace, count: int | None, duration_s: float | None
) -> RequestTrace:
    """Read a trace, or draw one from recorded habits of clients."""
    path = Path(args.trace)
    if not path.is_dir() and not path.name.startswith("chunk-"):
        return read_requests(path)
    drawn = read_clients(path).generate(read_seed(args))
    if count is not None:
        return RequestTrace(requests=tuple(islice(drawn, count)))
    if duration_s is None or args.rate is not None or args.concurrency is not None:
        what = "holds habits of clients, which go on for days"
        raise InputError([Problem(args.trace, what, "say how many with --requests")])
    end_s = duration_s * (
        1.0 if args.arrival_scale is None else parse_number(args.arrival_scale, "--arrival-scale")
    )
    return RequestTrace(requests=tuple(takewhile(lambda one: one.arrival_s < end_s, drawn)))


def _scaled(trace: RequestTrace, args: argparse.Namespace) -> RequestTrace:
    """Return a trace at the speed that was asked for."""
    if args.arrival_scale is None:
        return trace
    speed = parse_number(args.arrival_scale, "--arrival-scale")
    raise_problems(check_number("--arrival-scale", speed, 1e-6, 1e6))
    if not trace.has_times:
        fix = "leave out --arrival-scale and give --rate or --concurrency"
        raise InputError([Problem(args.trace, "has no arrival times to speed up", fix)])
    replace = msgspec.structs.replace
    return RequestTrace(
        requests=tuple(replace(one, arrival_s=one.arrival_s / speed) for one in trace.requests)
    )


def _replayed(
    trace: RequestTrace,
    pace: tuple[float | None, int | None],
    count: int | None,
    duration_s: float | None,
    args: argparse.Namespace,
) -> RequestStream:
    rate, in_flight = pace
    if in_flight is not None:
        found = trace.requests[:count]
        return RequestStream(f"{in_flight} at a time", lambda: iter(found), None, in_flight)
    if (
        rate is not None
        and trace.has_times
        and args.arrivals is None
        and rate != UNLIMITED_RATE_PER_S
    ):
        trace = trace.scale_to_rate(rate)
    elif rate is not None:
        times = _arrivals(rate, args.arrivals).times_s(Random(f"{read_seed(args)}/arrival"))
        replace = msgspec.structs.replace
        pairs = zip(trace.requests, times, strict=False)
        trace = RequestTrace(requests=tuple(replace(one, arrival_s=at) for one, at in pairs))
    elif not trace.has_times:
        fix = "give --rate or --concurrency"
        raise InputError([Problem(args.trace, "does not say when requests arrive", fix)])
    kept = tuple(
        one
        for one in islice(trace.requests, count)
        if duration_s is None or one.arrival_s < duration_s
    )
    span_s = kept[-1].arrival_s if kept else 0.0
    mean = (
        rate if rate is not None else (len(kept) - 1) / span_s if span_s else UNLIMITED_RATE_PER_S
    )
    name = _rate_name(rate) if rate is not None else f"as recorded, {_rate_name(mean)}"
    return RequestStream(name, lambda: iter(kept), mean)


def read_seed(args: argparse.Namespace) -> int:
    """Return the seed."""
    return parse_count(args.seed, "--seed")


def parse_lengths(text: str, where: str) -> Lengths:
    """Read lengths such as `512`, `100-1024` or `lognormal:400:0.8`."""
    kind, *parts = text.split(":")
    if kind == "lognormal" and len(parts) == 2:
        median, sigma = (parse_number(part, where) for part in parts)
        return LogNormalLength(median=median, sigma=sigma)
    if parts:
        fix = "write 512, 100-1024 or lognormal:400:0.8"
        raise InputError([Problem(where, f"{text!r} describes no lengths", fix)])
    low, dash, high = text.partition("-")
    if dash:
        return UniformLength(low=parse_count(low, where), high=parse_count(high, where))
    return FixedLength(tokens=parse_count(text, where))


def _prefix(text: str) -> PrefixSharing:
    groups, colon, tokens = text.partition(":")
    if not colon:
        fix = "write 8:1024 for 8 texts of 1024 tokens"
        raise InputError([Problem("--prefix", f"{text!r} does not say how long they are", fix)])
    return PrefixSharing(
        groups=parse_count(groups, "--prefix"), tokens=parse_lengths(tokens, "--prefix")
    )


def _arrivals(rate: float, kind: str | None) -> Arrivals:
    name, _, cv = (kind or "poisson").partition(":")
    if rate == UNLIMITED_RATE_PER_S:
        return ConstantArrivals(rate_per_s=rate)
    if name == "gamma" and cv:
        return GammaArrivals(rate_per_s=rate, cv=parse_number(cv, "--arrivals"))
    if name in ("poisson", "constant") and not cv:
        return (
            PoissonArrivals(rate_per_s=rate)
            if name == "poisson"
            else ConstantArrivals(rate_per_s=rate)
        )
    fix = "use poisson, constant or gamma:CV, such as gamma:2"
    raise InputError([Problem("--arrivals", f"there is no arrival process {kind!r}", fix)])


def _listed(text: str, where: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise InputError([Problem(where, "is empty", "give one number, or several: 1,2,4")])
    return words


def _rate(word: str) -> float:
    if word.lower() in ("inf", "infinity"):
        return UNLIMITED_RATE_PER_S
    found = parse_number(word, "--rate")
    raise_problems(check_number("--rate", found, 1e-6, 1e6))
    return found


def _in_flight(word: str) -> int:
    found = parse_count(word, "--concurrency")
    raise_problems(check_integer("--concurrency", found, most=100_000))
    return found


def _rate_name(rate: float | None) -> str:
    if rate is None or rate >= UNLIMITED_RATE_PER_S:
        return "all at once"
    return format_quantity(rate, "request/s", "requests/s")
