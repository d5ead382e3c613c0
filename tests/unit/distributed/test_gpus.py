"""Which GPU a process takes, in each situation that Ray and the user can bring about."""

import os
import sys
from collections.abc import Iterator

import pytest
import ray

from nemo_rl.distributed.gpus import assigned_gpus, local_gpu, own_gpu, visible_gpus

# The workers cannot import a test file.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
UUIDS = "GPU-0a6f,GPU-1b7e"


@pytest.mark.parametrize(
    ("visible", "gpu", "index"),
    [
        ("4,5,6,7", "6", 2),
        (" 4, 5 ,6,7", "6", 2),
        (None, "3", 3),
        ("6", "6", 0),
        (UUIDS, "GPU-1b7e", 1),
        ("MIG-7,MIG-8", "MIG-8", 1),
    ],
)
def test_index_of_a_visible_gpu(visible: str | None, gpu: str, index: int) -> None:
    assert local_gpu(visible, gpu) == index


@pytest.mark.parametrize(
    ("visible", "gpu", "shown"),
    [
        ("", "0", "''"),
        ("4,5,7", "6", "'4,5,7'"),
        ("16", "6", "'16'"),
        (UUIDS, "1", f"'{UUIDS}'"),
        (UUIDS, "GPU-2c8d", f"'{UUIDS}'"),
        (None, "GPU-0a6f", "unset"),
    ],
)
def test_a_gpu_that_is_not_visible_is_refused_with_list_and_id(visible: str | None, gpu: str, shown: str) -> None:
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES") as caught:
        local_gpu(visible, gpu)
    assert str(caught.value) == f"CUDA_VISIBLE_DEVICES: got {shown}; must list GPU {gpu}, which Ray gave this process"


def test_without_ray_the_first_visible_gpu_is_taken_and_a_child_sees_them_all() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert own_gpu(environment, []) == 0
    assert visible_gpus(environment, []) == {}


class Actor:
    def gpus(self) -> tuple[str | None, list[str], int, dict[str, str]]:
        given = assigned_gpus()
        return (
            os.environ.get("CUDA_VISIBLE_DEVICES"),
            given,
            own_gpu(os.environ, given),
            visible_gpus(os.environ, given),
        )


@pytest.fixture
def ray_of_four_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray counts them without looking for any."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    ray.init(address="local", num_cpus=1, num_gpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_actors_take_the_gpus_that_ray_gave_them_whether_or_not_it_hides_the_others(ray_of_four_gpus: None) -> None:
    keeps = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    actors = [
        ray.remote(Actor).options(num_cpus=0, num_gpus=2, runtime_env=runtime_env).remote()
        for runtime_env in ({}, keeps)
    ]
    answers = ray.get([actor.gpus.remote() for actor in actors], timeout=120)
    assert [visible for visible, *_ in answers] == [",".join(answers[0][1]), "4,5,6,7"]
    assert sorted(answers[0][1] + answers[1][1]) == ["4", "5", "6", "7"]
    for visible, given, index, for_child in answers:
        assert visible.split(",")[index] == given[0]
        assert for_child == {"CUDA_VISIBLE_DEVICES": ",".join(given)}
