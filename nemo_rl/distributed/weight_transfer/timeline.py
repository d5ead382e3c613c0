"""When each bucket of a refit was gathered, sent and loaded, as trainer rank 0 sees it."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

LANES = ("gather", "broadcast", "load")
"""`broadcast`: from the announcement until every engine has the bytes; `load`: from then until every engine has answered."""


@dataclass(frozen=True)
class Span:
    lane: str
    bucket: int
    start_s: float
    end_s: float
    """Both from the start of the refit."""


class Timeline:
    """Spans from any thread. On a GPU the gathers are timed by its events: the host runs ahead of them."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            torch.cuda.synchronize(device)
            self._origin = self._event()
        self._start_s = time.perf_counter()
        self._spans: list[Span] = []
        self._marked: list[tuple[str, int, torch.cuda.Event, torch.cuda.Event]] = []

    def now_s(self) -> float:
        return time.perf_counter() - self._start_s

    def add(self, lane: str, bucket: int, start_s: float, end_s: float) -> None:
        self._spans.append(Span(lane, bucket, start_s, end_s))

    @contextmanager
    def on_device(self, lane: str, bucket: int) -> Iterator[None]:
        """Times what the block enqueues on the current stream; on the CPU, the block."""
        start_s, start = self.now_s(), self._event() if self._is_cuda else None
        yield
        if start is None:
            self.add(lane, bucket, start_s, self.now_s())
        else:
            self._marked.append((lane, bucket, start, self._event()))

    def spans(self) -> tuple[Span, ...]:
        """In the order of their starts; waits for the device."""
        for lane, bucket, start, end in self._marked:
            end.synchronize()
            start_s, end_s = (self._origin.elapsed_time(event) / 1e3 for event in (start, end))
            self.add(lane, bucket, start_s, end_s)
        self._marked.clear()
        return tuple(sorted(self._spans, key=lambda span: span.start_s))

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def extent_s(spans: Iterable[Span]) -> float:
    """Seconds from the first start to the last end."""
    starts, ends = zip(*((span.start_s, span.end_s) for span in spans), strict=True)
    return float(max(ends) - min(starts))


def busy_s(spans: Iterable[Span], lane: str | None = None) -> float:
    """Seconds in which a lane was at work, or any; what overlaps counts once."""
    busy, end_s = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.start_s):
        if lane in (None, span.lane):
            busy += max(0.0, span.end_s - max(span.start_s, end_s))
            end_s = max(end_s, span.end_s)
    return busy
