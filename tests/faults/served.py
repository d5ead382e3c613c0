"""What engines answer while weights change: asked all the time, each answer of one forward pass."""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx

_PROMPT = list(range(5, 37))
_PAUSE_S = 0.1
_TIMEOUT_S = 60.0
_SAME = 1e-4
"""Two answers of the same float32 weights differ by less, whatever they were batched with."""
Fingerprint = tuple[float, ...]


def fingerprint(url: str, headers: Mapping[str, str]) -> Fingerprint:
    """Log-probs of a fixed prompt: one forward pass, so never of two versions. Raises httpx.HTTPError."""
    body = {
        "input_ids": _PROMPT,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    response = httpx.post(f"{url}/generate", json=body, headers=dict(headers), timeout=_TIMEOUT_S, trust_env=False)
    response.raise_for_status()
    entries = response.json()["meta_info"]["input_token_logprobs"]
    return tuple(entry[0] for entry in entries if entry[0] is not None)


def is_same(first: Fingerprint, second: Fingerprint) -> bool:
    return max(abs(a - b) for a, b in zip(first, second, strict=True)) < _SAME


class ServedWatch:
    """Asks engines directly, past every proxy and dispatcher, until the block ends; keeps what they answered.

    An engine that is paused answers when it is resumed, one that has ended never.
    """

    def __init__(self, urls: Sequence[str], headers: Mapping[str, str]) -> None:
        self._urls = urls
        self._headers = headers
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(len(urls))
        self.answers: list[Fingerprint] = []

    def __enter__(self) -> "ServedWatch":
        for url in self._urls:
            self._pool.submit(self._ask, url)
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, url: str) -> None:
        while not self._over.is_set():
            try:
                self.answers.append(fingerprint(url, self._headers))
            except httpx.HTTPError:
                if self._over.wait(1.0):
                    return
            time.sleep(_PAUSE_S)

    def num_partial(self, old: Fingerprint, new: Fingerprint) -> int:
        """Answers that are neither of the old weights nor of the new."""
        return sum(not (is_same(answer, old) or is_same(answer, new)) for answer in self.answers)
