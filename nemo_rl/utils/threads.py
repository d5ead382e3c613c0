"""A blocking call on a thread of its own."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def on_thread(name: str, action: Callable[[], T]) -> Future[T]:
    """Start `action`; the thread keeps no process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except Exception as error:  # noqa: BLE001 a future that is never set would be waited for until the deadline
            # Its frames hold what the action held, which must end with its owner and not with the error.
            future.set_exception(error.with_traceback(None))

    Thread(target=run, name=name, daemon=True).start()
    return future
