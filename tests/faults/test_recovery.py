"""Real trainers and a real engine that fails: the run goes on, with the right weights."""

from collections.abc import Iterator

import pytest
import ray
from fault_cases import CASES, RECOVERS
from fault_rig import FaultRig, start_rig
from soak import GROWTH_BYTES, run_soak


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultRig]:
    """One engine and two ranks that survive its death; the first refit is done."""
    with start_rig(tmp_path_factory.mktemp("faults"), num_engines=1, refit_timeout_s=60.0) as rig:
        yield rig


def test_ten_refits_of_which_one_loses_its_engine(rig: FaultRig) -> None:
    (old,) = rig.generation.rollout_engines
    (case,) = (case for case in CASES if case.name == "bucket: server SIGKILL while it receives")
    assert case.expected == RECOVERS
    soak = run_soak(rig, 10, lambda: case, lambda _: None)
    assert soak.is_equal
    assert soak.num_recoveries == 1
    assert rig.run.synchronizer.version == 11
    assert not rig.run.synchronizer.is_stale
    assert rig.generation.rollout_engines[0].name != old.name
    assert rig.orphans(rig.note_processes()) == []
    assert max(soak.growth_bytes().values()) < GROWTH_BYTES


def test_the_last_engine_lost_costs_no_sample(rig: FaultRig) -> None:
    (old,) = rig.generation.rollout_engines
    version = rig.run.synchronizer.version
    ray.get(rig.engine(0).act.remote("kill server"))
    assert rig.rollout() == 8
    assert rig.generation.rollout_engines[0].name != old.name
    assert rig.run.synchronizer.version == version
