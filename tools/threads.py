"""For tests: work in many threads whose first error is raised, and waiting for what another thread does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["run_threads", "wait_until"]


def run_threads(count: int, work: Callable[[int], None], *, limit: float = 120.0) -> None:
    """Run `work(number)` in threads and raise the first error any of them had."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + limit
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def wait_until(condition: Callable[[], bool], limit: float = 60.0) -> None:
    """Look again and again until the condition holds; an assertion fails when it takes longer than `limit` seconds."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "the condition never came true"
        time.sleep(0.001)
