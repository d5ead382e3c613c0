"""Calls to several engines at once: every answer, and what went wrong with each that gave none."""

from collections.abc import Mapping
from concurrent.futures import Future, wait
from typing import Any

from ray.exceptions import RayError, RayTaskError

from nemo_rl.distributed.worker_group import why_ended


def gather_answers(calls: Mapping[str, Future[Any]], timeout_s: float) -> tuple[dict[str, Any], dict[str, str]]:
    """Wait for all calls, at most `timeout_s`.

    Args:
        calls: the answer, by the name of who is asked; Ray's references give theirs with `future()`.

    Returns:
        Answers by name, and what went wrong by name. Every name is in one of them.
    """
    done, _ = wait(calls.values(), timeout=timeout_s)
    values, faults = {}, {}
    for name, answer in calls.items():
        if answer not in done:
            faults[name] = f"no answer within {timeout_s:.1f} s"
        elif (error := answer.exception()) is not None:
            faults[name] = _describe(error)
        else:
            values[name] = answer.result()
    return values, faults


def _describe(error: BaseException) -> str:
    if isinstance(error, RayTaskError):
        return str(error.cause)
    return why_ended(error) if isinstance(error, RayError) else str(error)
