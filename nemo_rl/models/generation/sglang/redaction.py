"""Takes keys out of a stream of output before any of it reaches a file."""

import re
from collections.abc import Iterable

_MASK = b"<redacted>"
_NUM_DIGITS = 16
"""So many digits of a key in a row are taken for it: two processes that write at once may split one."""
_MAX_HELD_BYTES = 1 << 16
"""A longer run of digits is let go."""
_RUN = re.compile(rb"[0-9a-f]{%d,}" % _NUM_DIGITS)
_DIGITS = b"0123456789abcdef"


class Redactor:
    """Feed it chunks in order; what it returns holds no key, wherever the chunks are cut."""

    def __init__(self, keys: Iterable[str]) -> None:
        """`keys`: lower-case hexadecimal digits."""
        self._parts = {
            key[start : start + _NUM_DIGITS].encode() for key in keys for start in range(len(key) - _NUM_DIGITS + 1)
        }
        self._held = b""

    def feed(self, chunk: bytes) -> bytes:
        """What may be written now. Digits at the very end are held back: a key may just be coming."""
        text = self._held + chunk
        start = len(text.rstrip(_DIGITS))
        if len(text) - start > _MAX_HELD_BYTES:
            start = len(text)
        self._held = text[start:]
        return self._redact(text[:start])

    def finish(self) -> bytes:
        """What was held back."""
        text, self._held = self._held, b""
        return self._redact(text)

    def _redact(self, text: bytes) -> bytes:
        return _RUN.sub(self._replace, text)

    def _replace(self, match: re.Match[bytes]) -> bytes:
        run = match.group()
        has_key = any(run[start : start + _NUM_DIGITS] in self._parts for start in range(len(run) - _NUM_DIGITS + 1))
        return _MASK if has_key else run
