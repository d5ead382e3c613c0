"""Whether the manifest, what is streamed and the checkpoint on disk are one and the same."""

import dataclasses
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tiny_fixes import CHANGED_BY_LOADING
from tiny_models import ModelCase, write_tiny_checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

from nemo_rl.config.schema import LoRAConfig
from nemo_rl.distributed.weight_transfer.engine_rules import FLOAT32_TENSORS
from nemo_rl.models.policy.export import dtensor_params_generator
from nemo_rl.models.policy.export_plan import ExportPlan
from nemo_rl.models.policy.parallelize import DP_AXIS, ShardOptions, load_sharded_model


@dataclass(frozen=True)
class StreamReport:
    num_tensors: int
    num_bytes: int
    num_renamed: int
    """Tensors on the wire that no parameter or buffer of the model has for a name."""
    differences: tuple[str, ...]
    """Empty when all is well."""


def single_rank_mesh() -> DeviceMesh:
    """A trainers' group of one, which the caller ends."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,), mesh_dim_names=(DP_AXIS,))


def check_class(case: ModelCase, folder: Path, mesh: DeviceMesh) -> StreamReport:
    """Write a tiny model of a class as the hub has it, and check its stream; raises CannotBuild."""
    write_tiny_checkpoint(case, folder, seed=0, hub_prefixes=True)
    report = check_stream(folder, mesh)
    known = [f"{pattern}: another value than on disk" for pattern in CHANGED_BY_LOADING.get(case.architecture, ())]
    left = tuple(line for line in report.differences if not any(fnmatch(line, pattern) for pattern in known))
    return dataclasses.replace(report, differences=left)


def check_stream(folder: Path, mesh: DeviceMesh) -> StreamReport:
    """Load a one-file bfloat16 checkpoint as a policy does and compare what it would send."""
    return _report(folder, *load_sharded_model(str(folder), mesh, ShardOptions(compute_dtype=torch.bfloat16)))


def check_adapters(folder: Path, mesh: DeviceMesh, exclude: list[str]) -> tuple[str, ...]:
    """The same with an adapter on every linear layer of the blocks but those that `exclude` names.

    While B is zero the stream is the file; with another B what has an adapter differs, and nothing else. One rank.

    Returns:
        What is not so.
    """
    lora = LoRAConfig(enabled=True, dim=2, exclude_modules=exclude)
    model, plan = load_sharded_model(str(folder), mesh, ShardOptions(compute_dtype=torch.bfloat16, lora=lora))
    differences = _report(folder, model, plan).differences
    before = {name: tensor.clone() for name, tensor in dtensor_params_generator(model, plan)}
    for update in plan.updates.values():
        torch.nn.init.ones_(model.get_parameter(update.b))
    after = dict(dtensor_params_generator(model, plan))
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    due = {spec.name for spec in plan.manifest.specs if plan.updates.keys() & set(spec.sources)}
    return (*differences, *(f"{name}: changed by an adapter or not, against the plan" for name in changed ^ due))


def _report(folder: Path, model: PreTrainedModel, plan: ExportPlan) -> StreamReport:
    planned = {spec.name: spec for spec in plan.manifest.specs}
    saved = load_file(folder / "model.safetensors")
    streamed = list(dtensor_params_generator(model, plan))
    sent = dict(streamed)
    differences = [f"{name}: sent {len(streamed)} tensors under {len(sent)} names" for name in sent][:1]
    differences = differences if len(sent) != len(streamed) else []
    if [name for name, _ in streamed] != [spec.name for spec in plan.manifest.specs]:
        differences.append("the order of the manifest is not that of the stream")
    differences += [f"{name}: on disk, not sent" for name in saved.keys() - sent.keys()]
    for name in sent.keys() & saved.keys():
        differences += _differences(name, sent[name], saved[name])
        if (tuple(sent[name].shape), sent[name].dtype) != (planned[name].shape, planned[name].dtype):
            differences.append(f"{name}: sent {sent[name].dtype} {list(sent[name].shape)}, {planned[name].describe()}")
    differences += [f"{name}: sent, not on disk" for name in sent.keys() - saved.keys()]
    return StreamReport(
        num_tensors=len(sent),
        num_bytes=sum(tensor.nbytes for tensor in sent.values()),
        num_renamed=sum((spec.name,) != spec.sources for spec in plan.manifest.specs),
        differences=tuple(sorted(differences)),
    )


def _differences(name: str, sent: torch.Tensor, saved: torch.Tensor) -> list[str]:
    if sent.shape != saved.shape:
        return [f"{name}: sent as {list(sent.shape)}, on disk {list(saved.shape)}"]
    is_exception = FLOAT32_TENSORS.search(name) is not None and sent.dtype == torch.float32
    if sent.dtype != saved.dtype and not is_exception:
        return [f"{name}: sent as {sent.dtype}, on disk {saved.dtype}"]
    if sent.is_meta:  # only rank 0 gathers
        return []
    if not sent.is_contiguous():
        return [f"{name}: not contiguous"]
    return [] if torch.equal(sent, saved.to(sent.dtype)) else [f"{name}: another value than on disk"]
