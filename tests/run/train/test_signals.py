"""Requests to stop, and the collector that keeps out of the way."""

import gc
import signal
import threading
from collections.abc import Iterator

import pytest

from meshwright.run.train.signals import catch_stop_signals, disable_gc


@pytest.fixture(autouse=True)
def _python_handles_interrupts() -> Iterator[None]:
    """A shell lets programs in its background ignore SIGINT; here Python's own handler counts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    with catch_stop_signals() as asked:
        assert asked() is None
        signal.raise_signal(number)
        assert asked() == number.name
    assert f"{number.name}: saves after this step" in capfd.readouterr().err


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_program(first: signal.Signals) -> None:
    with catch_stop_signals():
        signal.raise_signal(first)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handlers_are_as_before_afterwards() -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with catch_stop_signals():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_thread_trains_without_signals() -> None:
    found: list[str | None] = []

    def work() -> None:
        with catch_stop_signals() as asked:
            found.append(asked())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [None]


def test_the_collector_is_off_inside_and_as_before_afterwards() -> None:
    assert gc.isenabled()
    with disable_gc():
        assert not gc.isenabled()
    assert gc.isenabled()
