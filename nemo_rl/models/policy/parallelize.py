"""From a checkpoint folder to a model sharded by FSDP2, over tensor parallelism where the mesh has an axis for it.

Rank 0 alone reads the folder. Every rank builds the model on meta, shards it, and receives its part, one tensor at a
time. What the folder decides beside the weights (config, name conversions, buffers) travels ahead as a `ModelPlan`.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from nemo_rl.config.schema import LoRAConfig
from nemo_rl.models.model_source import find_model_class, read_config
from nemo_rl.models.policy.checkpoint import check_loaded, read_headers
from nemo_rl.models.policy.compiled_blocks import check_compiler, compile_blocks
from nemo_rl.models.policy.export_plan import ExportPlan, Headers, make_export_plan
from nemo_rl.models.policy.lora import add_adapters, init_adapters
from nemo_rl.models.policy.model_state import clean_name
from nemo_rl.models.policy.shards import DP_AXIS, TP_AXIS, own_block
from nemo_rl.models.policy.tensor_parallel import apply_tensor_parallel, check_tensor_parallel
from nemo_rl.models.policy.utils import find_blocks
from nemo_rl.models.policy.vision import find_vision_tower

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelPlan:
    """What every rank must know of a checkpoint that rank 0 alone reads."""

    config: PretrainedConfig
    generation_config: GenerationConfig
    conversions: list[Any]
    """The transforms that `from_pretrained` used, in the order in which it used them. Saving reverts them."""
    tied: dict[str, str]
    """Parameter name -> name of the parameter that it shares its storage with."""
    buffers: dict[str, tuple[torch.Size, torch.dtype]]
    """All buffers, the non-persistent ones too: on meta their values are lost."""
    headers: Headers
    """Of the weights on disk."""


@dataclass(frozen=True)
class ShardOptions:
    compute_dtype: torch.dtype
    """Dtype of the gathered weights and of the activations."""
    master_dtype: torch.dtype = torch.float32
    """Dtype of the shards."""
    trainable: bool = True
    freeze_vision_tower: bool = False
    attention: str | None = None
    """Implementation by its name in transformers; null: its own choice."""
    activation_checkpointing: bool = False
    torch_compile: bool = False
    """Of each block; needs a compiler."""
    cpu_offload: bool = False
    """Shards stay in host memory between uses; needs a cuda mesh."""
    lora: LoRAConfig | None = None
    """Train adapters alone."""
    seed: int = 0
    """Of new adapters."""


def load_sharded_model(folder: str, mesh: DeviceMesh, options: ShardOptions) -> tuple[PreTrainedModel, ExportPlan]:
    """Load a language or vision-language model and shard it over `mesh`, one of `make_mesh`. Collective.

    The plan is that of an export in the compute dtype.

    The model is in eval mode, also for training: dropout and router jitter would make the log-probs of the train
    forward differ from those that the loss compares them with.

    Raises:
        ValueError: on every rank, when rank 0 cannot load the folder whole, for `cpu_offload` without cuda, for
            `torch_compile` without a compiler, when the tensor-parallel axis does not suit the model, or when it would not
            be exported as the folder has it.
    """
    device = mesh_device(mesh)
    if options.torch_compile:
        check_compiler(device.type)
    if options.cpu_offload and device.type != "cuda":
        raise ValueError("policy.dtensor_cfg.cpu_offload: got true on device cpu; allowed only on cuda")
    read = _read_on_rank0(folder, options.master_dtype)
    plan = _broadcast_plan(read)
    source = read[0] if isinstance(read, tuple) else None
    model = _build_on_meta(plan, options)
    twin = _build_on_meta(plan, replace(options, master_dtype=options.compute_dtype))
    export_plan = make_export_plan(twin, plan.headers, options.compute_dtype)
    if options.lora is not None:
        export_plan = replace(export_plan, updates=add_adapters(model, options.lora))
        if source is not None:
            init_adapters(source, add_adapters(source, options.lora), options.lora.lora_a_init, options.seed)
    if TP_AXIS in (mesh.mesh_dim_names or ()):
        check_tensor_parallel(model, mesh[TP_AXIS].size())
        apply_tensor_parallel(model, mesh[TP_AXIS])
        _tie(model, plan.tied)
    shard_model(model, mesh[DP_AXIS], options)
    model.to_empty(device="cpu" if options.cpu_offload else device)
    _tie(model, plan.tied)
    _receive_parameters(model, source, device)
    _receive_buffers(model, source, plan, twin, device)
    model.eval()
    return model, export_plan


def mesh_device(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


def compute_device(model: PreTrainedModel) -> torch.device:
    """Where the forward pass runs; with `cpu_offload` the shards lie elsewhere."""
    parameter = next(model.parameters())
    return mesh_device(parameter.device_mesh) if isinstance(parameter, DTensor) else parameter.device


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def reshard(model: nn.Module) -> None:
    """Drop gathered weights: a forward pass without backward leaves copies that the next optimizer step makes stale."""
    for module in fsdp_modules(model):
        module.reshard()


def shard_model(model: PreTrainedModel, mesh: DeviceMesh, options: ShardOptions) -> None:
    """Apply FSDP2 to each block and to the root, in place. Gradients are summed over ranks, not averaged.

    On CPU gathered weights stay until the backward pass has used them: the gather costs more than the memory.
    """
    blocks = find_blocks(model)
    if options.activation_checkpointing:
        blocks = _checkpoint_activations(model, blocks)
    if options.torch_compile:
        compile_blocks(blocks)
    # Inputs stay as the model makes them: cast, the float32 rotary angles of vision towers would be rounded.
    policy = MixedPrecisionPolicy(
        param_dtype=options.compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    offload = CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy()
    for block in blocks:
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=mesh.device_type == "cuda",
        )
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=False)
    for module in fsdp_modules(model):
        # The loss is already divided by the global batch. gloo has no averaging reduction anyway.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)


def _checkpoint_activations(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Wrap blocks with torch's wrapper: the one of transformers acts in train mode only."""
    names = {id(module): name for name, module in model.named_modules()}
    wrapped = []
    for block in blocks:
        parent, _, leaf = names[id(block)].rpartition(".")
        wrapper = checkpoint_wrapper(block)
        setattr(model.get_submodule(parent), leaf, wrapper)
        wrapped.append(wrapper)
    return wrapped


def _read_on_rank0(folder: str, dtype: torch.dtype) -> tuple[PreTrainedModel, ModelPlan] | ValueError | None:
    """The whole model on rank 0's host, None elsewhere. A failure is returned, so that every rank can raise it."""
    if dist.get_rank() != 0:
        return None
    try:
        model_class = find_model_class(read_config(Path(folder)))
        loaded: Any = model_class.from_pretrained(folder, dtype=dtype, output_loading_info=True)
        headers = read_headers(Path(folder))
    except Exception as error:  # noqa: BLE001 whatever it is, the other ranks wait for the outcome
        return ValueError(f"policy.model_name: cannot load {folder!r}: {error}")
    model: PreTrainedModel = loaded[0]
    info: dict[str, Any] = loaded[1]
    try:
        check_loaded(Path(folder), info)
    except ValueError as error:
        return error
    if info["unexpected_keys"]:
        logger.warning("%s: weights that the model does not use: %s", folder, sorted(info["unexpected_keys"]))
    return model, _make_plan(model, headers)


def _broadcast_plan(read: tuple[PreTrainedModel, ModelPlan] | ValueError | None) -> ModelPlan:
    box: list[Any] = [read[1] if isinstance(read, tuple) else read]
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], ValueError):
        raise box[0]
    plan: ModelPlan = box[0]
    return plan


def _make_plan(source: PreTrainedModel, headers: Headers) -> ModelPlan:
    # Sharding renames the class; what is exported must carry the name that transformers knows.
    source.config.architectures = [type(source).__name__]
    return ModelPlan(
        config=source.config,
        generation_config=source.generation_config if source.can_generate() else GenerationConfig(),
        conversions=cast(list[Any], source._weight_conversions),
        tied=dict(source.all_tied_weights_keys),
        buffers={name: (buffer.shape, buffer.dtype) for name, buffer in source.named_buffers()},
        headers=headers,
    )


def _build_on_meta(plan: ModelPlan, options: ShardOptions) -> PreTrainedModel:
    with torch.device("meta"):
        model: Any = find_model_class(plan.config)._from_config(
            plan.config, dtype=options.master_dtype, attn_implementation=options.attention
        )
    if dict(model.all_tied_weights_keys) != plan.tied:
        raise ValueError(
            f"policy.model_name: the config ties {dict(model.all_tied_weights_keys)}, the checkpoint {plan.tied}; "
            "set tie_word_embeddings in config.json to what the weights are"
        )
    model.generation_config = plan.generation_config
    # fully_shard gives the class a new name, after which transformers no longer finds the conversions by itself.
    model._weight_conversions = plan.conversions
    model.requires_grad_(options.trainable)
    if options.freeze_vision_tower:
        find_vision_tower(model).requires_grad_(False)
    built: PreTrainedModel = model
    return built


def _tie(model: nn.Module, tied: dict[str, str]) -> None:
    """Materializing meta parameters gives each name a tensor of its own: join the tied ones again."""
    for target, source in tied.items():
        parent, _, leaf = target.rpartition(".")
        model.get_submodule(parent).register_parameter(leaf, model.get_parameter(source))


@torch.no_grad()
def _receive_parameters(model: nn.Module, source: PreTrainedModel | None, device: torch.device) -> None:
    """Rank 0 sends each tensor whole, one at a time; every rank keeps its part."""
    named = source.named_parameters(remove_duplicate=False) if source is not None else ()
    held = {clean_name(name): parameter for name, parameter in named}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        if held:
            whole = held[clean_name(name)].detach().to(device, parameter.dtype).contiguous()
        else:
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        dist.broadcast(whole, src=0)
        local = parameter.to_local()
        local.copy_(own_block(whole, parameter).reshape(local.shape))


def _receive_buffers(
    model: nn.Module, source: PreTrainedModel | None, plan: ModelPlan, twin: PreTrainedModel, device: torch.device
) -> None:
    """Those that no checkpoint holds get the dtype that they have in a model of the compute dtype, `twin`."""
    held = dict(source.named_buffers()) if source is not None else {}
    stored = twin.state_dict().keys()
    made = {name: buffer.dtype for name, buffer in twin.named_buffers() if name not in stored}
    for name, (shape, dtype) in plan.buffers.items():
        value = held[name].to(device) if held else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(value, src=0)
        parent, _, leaf = name.rpartition(".")
        model.get_submodule(parent)._buffers[leaf] = value.to(made.get(name, dtype))
