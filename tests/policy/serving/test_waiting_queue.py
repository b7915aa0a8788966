"""Turns go by priority, then by what each tenant got, then by order."""

from dataclasses import dataclass

from meshwright.policy.serving.waiting_queue import MAX_TRACKED_TENANTS, WaitingQueue


@dataclass(eq=False)
class One:
    name: str
    tenant: str = ""
    priority: int = 0


def order(waiting: WaitingQueue[One]) -> str:
    names = []
    while waiting:
        names.append(waiting.pop().name)
    return "".join(names)


def test_first_come_first_served() -> None:
    waiting: WaitingQueue[One] = WaitingQueue()
    for name in "abc":
        waiting.push(One(name))
    waiting.push(One("z"), first=True)
    assert (len(waiting), order(waiting)) == (4, "zabc")
    assert waiting.peek() is None


def test_higher_priorities_go_first() -> None:
    waiting: WaitingQueue[One] = WaitingQueue()
    waiting.push(One("a"))
    waiting.push(One("b", priority=2))
    waiting.push(One("c", priority=1))
    waiting.push(One("d", priority=2))
    assert order(waiting) == "bdca"


def test_the_tenant_that_got_least_goes_first() -> None:
    waiting: WaitingQueue[One] = WaitingQueue()
    for name in "abc":
        waiting.push(One(name, "greedy"))
    waiting.push(One("x", "modest"))
    waiting.push(One("y", "modest"))
    turns = []
    while waiting:
        one = waiting.pop()
        turns.append(one.name)
        waiting.charge_tokens(one.tenant, 100 if one.tenant == "greedy" else 30)
    assert turns == ["a", "x", "y", "b", "c"]


def test_who_waits_already_is_not_charged_for_coming_again() -> None:
    waiting: WaitingQueue[One] = WaitingQueue()
    waiting.push(One("a", "greedy", priority=1))
    waiting.push(One("x", "modest", priority=1))
    waiting.charge_tokens("greedy", 50)
    # Somebody of the modest tenant made room, and waits at another priority.
    waiting.push(One("y", "modest"), first=True)
    assert order(waiting) == "xay"


def test_a_weight_of_two_gets_twice_as_much() -> None:
    waiting: WaitingQueue[One] = WaitingQueue({"big": 2.0})
    for _ in range(90):
        waiting.push(One("b", "big"))
        waiting.push(One("s", "small"))
    turns = ""
    for _ in range(60):
        one = waiting.pop()
        turns += one.name
        waiting.charge_tokens(one.tenant, 10)
    assert turns.count("b") == 40


def test_nobody_saves_up_turns_while_away() -> None:
    waiting: WaitingQueue[One] = WaitingQueue()
    waiting.push(One("late", "away"))
    assert waiting.pop().name == "late"
    for _ in range(4):
        waiting.push(One("o", "other"))
    for _ in range(2):
        waiting.charge_tokens(waiting.pop().tenant, 1000)
    for _ in range(4):
        waiting.push(One("a", "away"))
    # It comes in level with the other, and does not get everything until it caught up.
    turns = ""
    while waiting:
        one = waiting.pop()
        turns += one.name
        waiting.charge_tokens(one.tenant, 1000)
    assert turns in {"oaoaaa", "aoaoaa"}


def test_who_left_is_skipped() -> None:
    waiting: WaitingQueue[One] = WaitingQueue()
    ones = [One(name) for name in "abc"]
    for one in ones:
        waiting.push(one)
    waiting.remove(ones[0])
    waiting.remove(ones[1])
    assert len(waiting) == 1
    assert order(waiting) == "c"


def test_who_calls_himself_otherwise_every_time_is_not_remembered_for_ever() -> None:
    waiting: WaitingQueue[One] = WaitingQueue()
    for number in range(5 * MAX_TRACKED_TENANTS):
        one = One("x", f"tenant {number}", priority=number % 1000)
        waiting.push(one)
        if number % 3:
            waiting.charge_tokens(waiting.pop().tenant, 7)
        else:
            waiting.remove(one)
    assert len(waiting._got) <= 2 * MAX_TRACKED_TENANTS + 1
    assert len(waiting._levels) <= 1
    assert not waiting._left


def test_who_came_last_is_remembered_among_many() -> None:
    waiting: WaitingQueue[One] = WaitingQueue()

    def come(name: str, tenant: str, tokens: float) -> None:
        waiting.push(One(name, tenant))
        waiting.charge_tokens(waiting.pop().tenant, tokens)

    for number in range(4 * MAX_TRACKED_TENANTS):
        come("x", f"tenant {number}", 1)
        if number == 3 * MAX_TRACKED_TENANTS + 1:
            come("g", "greedy", 1000)
    for one in (One("n", "new"), One("n", "new"), One("g", "greedy")):
        waiting.push(one)
    turns = ""
    while waiting:
        one = waiting.pop()
        turns += one.name
        waiting.charge_tokens(one.tenant, 10)
    assert turns == "nng"
