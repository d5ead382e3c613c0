"""One deadline, shared by every wait of an operation."""

import time


class Deadline:
    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._end_s - time.monotonic())

    def require(self, what: str) -> float:
        """Seconds left; raises TimeoutError naming `what` when there are none."""
        left_s = self.remaining_s()
        if not left_s:
            raise TimeoutError(f"{what}: not done within {self.timeout_s:g} s")
        return left_s
