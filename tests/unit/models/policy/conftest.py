"""A group of one rank in the test process."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from policy_cases import free_port
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nemo_rl.models.policy.utils import init_process_group


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    init_process_group(
        device=torch.device("cpu"),
        rank=0,
        world_size=1,
        master_addr="127.0.0.1",
        master_port=free_port(),
        timeout_s=60.0,
    )
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    dist.destroy_process_group()
