"""`call_with_deadline`: bounded wait for a library call that has no timeout of its own."""

import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


class DeadlineExceededError(Exception):
    """A call has not returned by its deadline; the thread that is in it is left behind."""


def call_with_deadline(call: Callable[[], _T], within_s: float, name: str) -> _T:
    """Return or raise what a call does; raise `DeadlineExceededError` when the time is over.

    It is called in a thread of the given name, which nobody waits for when this process ends.
    """
    returned: list[_T] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            returned.append(call())
        except BaseException as error:  # noqa: BLE001  raised where somebody waits for it
            raised.append(error)

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    thread.join(within_s)
    if raised:
        raise raised[0]
    if returned:
        return returned[0]
    raise DeadlineExceededError(f"{name}: not within {within_s:g} s")
