"""Whether a response is right: pure functions of (response, reference)."""

import re

_NUMBER = re.compile(
    r"(?<![0-9.])(?P<sign>[-\u2212])?"
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
    r"(?P<fraction>\.[0-9]+)?"
)
_INTEGER = re.compile(r"\s*(?P<sign>[-+\u2212]?)(?P<digits>[0-9]+)\s*")


def last_integer(response: str, reference: str) -> bool:
    """Whether the last number of `response` is the integer `reference`.

    `1,234`, `-37`, U+2212 as minus, `-37.` and `37.0` count as integers; a minus directly behind a digit is an operator
    (`5-3` ends in 3); a last number with a fraction other than zeros is wrong; so is a response without a number.

    Raises:
        ValueError: `reference` is not an integer.
    """
    return _last_integer(response) == parse_reference(reference)


def parse_reference(reference: str) -> str:
    """Canonical decimal string; raises ValueError where `reference` is not an integer."""
    match = _INTEGER.fullmatch(reference)
    if match is None:
        raise ValueError(f"env.math.verifier: 'last_integer' needs integer references; got {reference!r}")
    return _canonical(match["sign"], match["digits"])


def _last_integer(response: str) -> str | None:
    last = None
    for match in _NUMBER.finditer(response):
        last = match
    if last is None or (last["fraction"] or ".").strip(".0"):
        return None
    return _canonical(last["sign"], last["digits"])


def _canonical(sign: str | None, digits: str) -> str:
    """Compared as text: a response may hold more digits than `int()` accepts."""
    magnitude = digits.replace(",", "").lstrip("0") or "0"
    return f"-{magnitude}" if sign in ("-", "\u2212") and magnitude != "0" else magnitude


def math_verify(response: str, reference: str) -> bool:
    """Whether the answer found in `response` is mathematically equal to `reference` (package math-verify).

    A reference without `$` or `\\boxed` is taken as LaTeX. Needs the main thread: the package's time limit, 5 s for
    parsing and 5 s for comparing, is a signal.
    """
    from math_verify import parse, verify

    gold = parse(reference if "$" in reference or "\\boxed" in reference else f"${reference}$")
    return bool(verify(gold, parse(response)))
