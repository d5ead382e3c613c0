import time

import pytest

from nemo_rl.models.generation.sglang.redaction import Redactor

KEY, OTHER = "0123456789abcdef" * 4, "fedcba9876543210" * 4
DIGEST = "5" * 64


def _redact(text: bytes, size: int) -> bytes:
    redactor = Redactor([KEY, OTHER])
    parts = [redactor.feed(text[start : start + size]) for start in range(0, len(text), size)]
    return b"".join([*parts, redactor.finish()])


@pytest.mark.parametrize("size", [1, 7, 63, 64, 65, 1000])
def test_keys_are_replaced_wherever_the_text_is_cut(size):
    line = f"server_args={{'api_key': '{KEY}', 'admin_api_key': '{OTHER}', 'tp': 1}} {DIGEST}\n"
    expected = f"server_args={{'api_key': '<redacted>', 'admin_api_key': '<redacted>', 'tp': 1}} {DIGEST}\n"
    assert _redact((line * 3).encode(), size) == (expected * 3).encode()


def test_a_key_split_by_another_writer_shows_at_most_15_digits():
    assert _redact(f"'{KEY[:40]}[12:00] hello\n{KEY[40:]}'".encode(), 8) == b"'<redacted>[12:00] hello\n<redacted>'"
    assert _redact(f"'{KEY[:15]} hello\n{KEY[15:]}'".encode(), 8) == b"'0123456789abcde hello\n<redacted>'"


def test_text_without_digits_at_its_end_is_not_held_back():
    redactor = Redactor([KEY])
    assert redactor.feed(b"no line's end") == b"no line's en"
    assert redactor.feed(b"\n") == b"d\n"
    assert redactor.finish() == b""


def test_bytes_that_are_no_text_pass():
    assert _redact(b"\xff\x00\xfe\r\n", 1) == b"\xff\x00\xfe\r\n"


def test_megabytes_without_a_line_end_pass_in_linear_time_and_bounded_memory():
    start_s = time.monotonic()
    redactor = Redactor([KEY])
    out = [redactor.feed(b"5" * 65536) for _ in range(32)]
    assert sum(len(part) for part in out) >= 31 * 65536
    out += [redactor.feed(KEY.encode()), redactor.finish()]
    assert KEY[:16].encode() not in b"".join(out)
    assert time.monotonic() - start_s < 10
