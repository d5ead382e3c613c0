"""Shards that lie elsewhere than the buckets stay where they lie. `meta` stands for the GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import policy_cases as cases
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from nemo_rl.models.policy.conversions import TensorGroup
from nemo_rl.models.policy.export import dtensor_params_generator
from nemo_rl.models.policy.parallelize import ShardOptions, load_sharded_model

GPU = torch.device("meta")


class UnconvertibleGroup(TensorGroup):
    def to_checkpoint(self, *arguments: Any) -> dict[str, torch.Tensor]:
        raise ArithmeticError("cannot be converted")


def places(model: PreTrainedModel) -> dict[str, tuple[torch.device, int]]:
    """Device and address of every shard."""
    locals_ = {name: parameter.to_local() for name, parameter in model.named_parameters()}
    return {name: (local.device, local.data_ptr()) for name, local in locals_.items()}


@pytest.mark.parametrize("fails", [False, True])
def test_a_walk_over_offloaded_shards_moves_none_of_them(fails: bool, tmp_path: Path, mesh: DeviceMesh) -> None:
    folder = cases.write_model(tmp_path / "model", cases.moe_config())
    model, plan = load_sharded_model(folder, mesh, ShardOptions(compute_dtype=torch.bfloat16))
    before = places(model)
    assert {device.type for device, _ in before.values()} == {"cpu"}
    if fails:
        groups = [UnconvertibleGroup(**vars(group)) if group.converter else group for group in plan.groups]
        with pytest.raises(ArithmeticError, match="cannot be converted"):
            list(dtensor_params_generator(model, replace(plan, groups=tuple(groups)), device=GPU))
    else:
        sent = list(dtensor_params_generator(model, plan, device=GPU))
        assert {tensor.device for _, tensor in sent} == {GPU}
        assert len(sent) == len(plan.manifest.specs)
    assert places(model) == before
