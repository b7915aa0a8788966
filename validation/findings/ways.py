"""Ways to plant a fault, each of which plants so many ns of cost and says what it planted."""

from collections.abc import Callable
from typing import Any

from validation.findings.planting import Planter, Work

MS = 1_000_000


def stalls(
    number: int, *spans: dict[str, Any], last: float = 0.95, ahead: bool = False
) -> Callable[..., int]:
    """The host does something else, in several places, before it launches."""

    def plant(planter: Planter, cost: int) -> int:
        for place in planter.places(number, last=last, ahead=ahead):
            planter.stall(place, cost // number, [dict(span) for span in spans])
        return cost

    return plant


def host(
    name: str, category: str = "cpu_op", begin: float = 0.2, end: float = 2.0
) -> dict[str, Any]:
    """A span of the host during a stall."""
    return {"name": name, "category": category, "from": begin, "to": end}


def waits(*operators: str) -> Callable[..., int]:
    """The host waits for the device, inside these operators, and goes on late."""
    around = (host(name, begin=0.02 + 0.01 * at, end=1.02) for at, name in enumerate(operators))
    call = host("cudaStreamSynchronize", "cuda_runtime", 0.1, 1.01)
    return stalls(12, *around, call, ahead=True)


def inserts(
    works: Callable[[int], list[Work]], *, of_cost: float = 1.0, number: int = 12,
    around: dict[str, Any] | None = None,
) -> Callable[..., int]:  # fmt: skip
    """Insert work of `cost / of_cost` in several places; `works` gets the length of one place."""

    def plant(planter: Planter, cost: int) -> int:
        for place in planter.places(number):
            planter.insert(place, works(round(cost / of_cost / number)), around)
        return cost

    return plant


def kernels(name: str, count: int = 4, **more: Any) -> Callable[[int], list[Work]]:
    """Kernels of one name that share a length."""
    return lambda length: [Work(name, max(1, length // count), more=more) for _ in range(count)]


def copies(name: str, count: int = 2, **more: Any) -> Callable[[int], list[Work]]:
    """Copies of one name that share a length."""
    given = {"category": "gpu_memcpy", "bytes": 1 << 20, **more}
    return lambda length: [
        Work(name, max(1, length // count), "memory_copy", more=given) for _ in range(count)
    ]


def collectives(collective: str, count: int = 2, **more: Any) -> Callable[[int], list[Work]]:
    """Collectives of one kind that share a length."""
    words = "".join(word.title() for word in collective.split("_"))
    given = {
        "collective": collective,
        "lane": "stream 20",
        "bytes": 64 << 20,
        "group": "dp",
        **more,
    }
    name = f"ncclDevKernel_{words}_Sum_bf16_RING_LL"
    return lambda length: [
        Work(name, max(1, length // count), "communication", more=given) for _ in range(count)
    ]


def crawl(planter: Planter, cost: int) -> int:
    """Runs of short kernels, each launched 20 µs late."""
    number = max(100, cost // 20_000)
    runs = max(1, number // 100)
    for place in planter.places(runs):
        begin = min(place, planter.kernels.size - 2)
        works = [Work("void tiny_kernel<int>()", 5_000) for _ in range(number // runs)]
        planter.stall(begin, 100_000)
        _late_run(planter, begin, works, 20_000)
    return int(number // runs * runs * 20_000)


def _late_run(planter: Planter, place: int, works: list[Work], gap: int) -> None:
    """Kernels that are launched one by one, each `gap` after the one before has ended."""
    kernel, launch = int(planter.kernels[place]), int(planter.launches[place])
    begin, wanted = int(planter.start[kernel]), int(planter.start[launch])
    whole = sum(one.length_ns + gap for one in works)
    planter.shift(device=False, moment=wanted, by=whole)
    planter.shift(device=True, moment=begin, by=whole)
    process, _, lane = planter.lane.partition(" stream ")
    clock = begin
    for one in works:
        planter.flow += 1
        call = {"name": "cudaLaunchKernel", "category": "cuda_runtime", "flow_out": planter.flow}
        clock += gap
        planter.add({**call, "start_ns": clock - 3_000, "duration_ns": 2_500}, launch)
        planter.add(
            {"process": process, "lane": f"stream {lane}", "category": "kernel", "kind": one.kind,
             "name": one.name, "start_ns": clock, "duration_ns": one.length_ns,
             "flow_in": planter.flow}, None,
        )  # fmt: skip
        clock += one.length_ns


def tiny(planter: Planter, cost: int) -> int:
    """More tiny kernels than others, with gaps of 3 µs."""
    number = max(cost // 3_000, 2 * planter.kernels.size)
    gap = max(500, cost // number)
    for place in planter.places(20):
        works = [Work("void tiny_kernel<int>()", 3_000, gap_ns=gap) for _ in range(number // 20)]
        planter.insert(place, works)
    return int(number // 20 * 20 * gap)


def hold(planter: Planter, cost: int) -> int:
    """The device waits before kernels that were launched."""
    for place in planter.places(10):
        planter.hold(place, cost // 10)
    return cost


def round_trip(planter: Planter, cost: int) -> int:
    """Tensors that go to the host and come back."""
    number = max(10, cost // (3 * MS))
    for place in planter.places(number):
        given = {"category": "gpu_memcpy", "bytes": 123_456}
        part = cost // number // 3
        out = Work("Memcpy DtoH (Device -> Pinned)", part, "memory_copy", more=given)
        back = Work("Memcpy HtoD (Pinned -> Device)", part, "memory_copy", gap_ns=part, more=given)
        planter.insert(place, [out, back])
    return cost


def fills(planter: Planter, cost: int) -> int:
    """Storms of memsets in zero_grad."""
    steps = max(2, len(planter.step_starts()))
    number = steps * 150
    for place in planter.places(number // 50):
        length = max(1_000, cost // number)
        given = {"category": "gpu_memset"}
        planter.insert(
            place, [Work("Memset (Device)", length, "memory_copy", more=given)] * 50,
            {"name": "Optimizer.zero_grad#AdamW.zero_grad", "category": "user_annotation"},
        )  # fmt: skip
    return number // 50 * 50 * max(1_000, cost // number)


def small(planter: Planter, cost: int) -> int:
    """Thirty small all-reduces a step."""
    number = max(2, len(planter.step_starts())) * 30
    for place in planter.places(number // 10):
        planter.insert(place, collectives("all_reduce", 10, bytes=4096)(cost // (number // 10)))
    return cost


def slowed(planter: Planter, cost: int) -> int:
    """Kernels beside communication take a quarter longer."""
    talks = [
        (int(planter.start[row]), int(planter.start[row] + planter.length[row]))
        for row, kind in enumerate(planter.columns["kind"])
        if kind == "communication"
    ]

    def beside(row: int, start: int) -> bool:
        end = start + int(planter.length[row])
        return any(min(end, high) - max(start, low) > 0.6 * (end - start) for low, high in talks)

    rows = [row for row in planter.kernels.tolist() if beside(row, int(planter.start[row]))]
    spent = sum(int(planter.length[row]) for row in rows)
    factor = 1 + min(1.0, max(0.25, cost / max(1, spent)))
    # Collectives go on for as long as the kernels beside them.
    assert rows, "nothing computes beside communication here"
    total = 0
    for row in sorted(rows, key=lambda one: int(planter.start[one])):
        more = round(int(planter.length[row]) * (factor - 1))
        end = int(planter.start[row] + planter.length[row])
        talking = [
            at for at, kind in enumerate(planter.columns["kind"])
            if kind == "communication"
            and planter.start[at] < end <= planter.start[at] + planter.length[at] + 1
        ]  # fmt: skip
        planter.shift(device=True, moment=end, by=more)
        for at in talking:
            planter.length[at] += more
        planter.length[row] += more
        total += more
    return total


def outlier(planter: Planter, cost: int) -> int:
    """One long stall in the middle."""
    planter.stall(planter.places(1, first=0.4, last=0.6)[0], cost, [host("some_python", "cpu_op")])
    return cost


def _later_steps(planter: Planter) -> list[int]:
    """Places of the first kernels of steps after the middle, one each."""
    starts = planter.step_starts()
    begun = planter.start[planter.launches]
    return [
        min(int((begun < start).sum()) + 1, planter.kernels.size - 1)
        for start in starts[len(starts) // 2 : -1]
    ]


def change(planter: Planter, cost: int) -> int:
    """Every step of the second half stalls."""
    places = _later_steps(planter)
    cost = max(cost, round(0.1 * planter.window_ns))
    for place in places:
        planter.stall(place, cost // len(places), [host("some_python", "cpu_op")])
    return cost


def slow_down(planter: Planter, _cost: int) -> int:
    """Kernels of the second half take a tenth longer."""
    half = planter.step_starts()[len(planter.step_starts()) // 2]
    after = set(planter.kernels[planter.start[planter.launches] >= half].tolist())
    return planter.stretch(lambda row, _: row in after, 1.10)


def fragments(planter: Planter, _cost: int) -> int:
    """Counters of memory that is reserved and not used."""
    planter.columns["counters"] = {  # type: ignore[assignment]
        "rank": planter.rank, "name": ["memory allocated gpu 0", "memory reserved gpu 0"],
        "unit": "bytes", "time_ns": int(planter.start[0]), "value": [40.0 * 2**30, 75.0 * 2**30],
    }  # fmt: skip
    return 0
