"""Wall-clock spans by name."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Timer:
    """Sums the seconds of equally named spans until `take` empties it."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds
