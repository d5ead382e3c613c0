"""Calls to several actors at once: every answer, and what went wrong with each that gave none."""

from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from nemo_rl.distributed.worker_group import why_ended


def gather_answers(calls: Mapping[str, Any], timeout_s: float) -> tuple[dict[str, Any], dict[str, str]]:
    """Wait for all calls, at most `timeout_s`.

    Args:
        calls: Ray's reference to the answer, by the name of who is asked.

    Returns:
        Answers by name, and what went wrong by name. Every name is in one of them.
    """
    done, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout_s) if calls else ([], [])
    finished, values, faults = set(done), {}, {}
    for name, reference in calls.items():
        if reference not in finished:
            faults[name] = f"no answer within {timeout_s:.1f} s"
            continue
        try:
            values[name] = ray.get(reference)
        except RayTaskError as error:
            faults[name] = str(error.cause)
        except RayError as error:
            faults[name] = why_ended(error)
    return values, faults
