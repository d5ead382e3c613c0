"""One trainer rank: a shard of the policy, its optimizer, and on demand a shard of the frozen reference."""

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoTokenizer, PreTrainedModel

from nemo_rl.config.schema import PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.gpus import assigned_gpus, own_gpu
from nemo_rl.distributed.weight_transfer.broadcast import broadcast_hf_buckets_via_distributed_impl
from nemo_rl.distributed.weight_transfer.buckets import BucketLayout, FlatBuffers, bucket_layouts
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.errors import TransferError
from nemo_rl.distributed.weight_transfer.process_group import WeightUpdateGroup, default_backend
from nemo_rl.distributed.weight_transfer.rank_exchange import RankExchange, on_rank0
from nemo_rl.distributed.weight_transfer.receiver import Receiver
from nemo_rl.distributed.weight_transfer.rollout_engines import (
    connect_rollout_engines_from_distributed,
    disconnect_rollout_engines_from_distributed,
)
from nemo_rl.distributed.weight_transfer.sender import BucketSender, RefitStats
from nemo_rl.distributed.weight_transfer.timeline import Timeline
from nemo_rl.models.policy.adapter_folder import export_adapter
from nemo_rl.models.policy.export import dtensor_params_generator
from nemo_rl.models.policy.export_plan import ExportPlan
from nemo_rl.models.policy.hf_folder import copy_processor, export_hf
from nemo_rl.models.policy.interfaces import LossFunction, TrainResult
from nemo_rl.models.policy.lora import adapters_off
from nemo_rl.models.policy.model_state import ModelState
from nemo_rl.models.policy.parallelize import ShardOptions, load_sharded_model
from nemo_rl.models.policy.refit_walk import RefitWalk
from nemo_rl.models.policy.shards import DP_AXIS, make_mesh
from nemo_rl.models.policy.train_step import compute_logprobs, make_optimizer, make_scheduler, train_on_batch
from nemo_rl.models.policy.utils import (
    PRECISION_DTYPES,
    TARGET_DTYPES,
    free_memory_bytes,
    init_process_group,
    resolve_device,
)
from nemo_rl.utils.log import configure_logging

CPU_EAGER_TOKENS = 256
"""Up to this length eager attention is the faster one on CPU: at 58 tokens its forward and backward take a quarter of
SDPA's time, at 256 as long, at 1024 three times as long."""

_PART_S = 10.0
"""How long a reconnect waits for the engines of the old group."""

logger = logging.getLogger(__name__)


class DTensorPolicyWorkerV2:
    """Runs on every trainer rank; each method but `free_memory_bytes` is collective, so call it on all ranks.

    Data come as this rank's equal part of the batch, results go back for the same part. Ranks of one tensor-parallel group
    get the same part.
    """

    def __init__(
        self,
        *,
        cfg: PolicyConfig,
        loss_needs_reference: bool,
        model_folder: str,
        tokenizer_folder: str | None,
        device: str,
        rank: int,
        world_size: int,
        master_addr: str,
        master_port: int,
        timeout_s: float,
        seed: int,
        log_file: str,
    ) -> None:
        """Join the other ranks and load the model.

        Args:
            loss_needs_reference: hold a frozen copy of the initial policy for `get_reference_policy_logprobs`. With LoRA
                there is none: the base without its adapters is the initial policy.
            model_folder: Hugging Face folder; read on rank 0 alone.
            tokenizer_folder: its tokenizer goes into exports; null: exports hold none.
            device: `cpu` or `cuda` (the GPU that Ray gave this actor, else the first visible one).
            master_addr: address of rank 0, for the trainers' group and for the weight-update group.
            timeout_s: of every collective.
        """
        tensor_parallel_size = cfg.dtensor_cfg.tensor_parallel_size
        if world_size % tensor_parallel_size:
            raise ValueError(
                f"policy.dtensor_cfg.tensor_parallel_size: got {tensor_parallel_size}; must divide the {world_size} ranks"
            )
        self.num_shards = world_size // tensor_parallel_size
        """Of the data."""
        if cfg.train_global_batch_size % self.num_shards:
            raise ValueError(
                f"policy.train_global_batch_size: got {cfg.train_global_batch_size}; "
                f"allowed multiples of the number of data-parallel ranks, {self.num_shards}"
            )
        configure_logging(Path(log_file))
        self.cfg = cfg
        self.master_addr = master_addr
        self._server_cfg = cfg.generation.sglang_cfg.sglang_server_config
        self._engines: Sequence[Receiver] = ()
        self._update_group: WeightUpdateGroup | None = None
        self._buffers: FlatBuffers | None = None
        self._state: ModelState | None = None
        """That `refit_plan` has last found to be the model's."""
        self._prepared: tuple[tuple[str, int, bool], RefitWalk] | None = None
        """And what it is for: ticket, bucket size in bytes, negated."""
        self._held: Mapping[str, torch.nn.Parameter] = {}
        """What was frozen when every engine of the group got all weights: they have its values."""
        self.tokenizer_folder = tokenizer_folder
        self.model_folder = model_folder
        self.device = resolve_device(device, own_gpu(os.environ, assigned_gpus()))
        self.dtype = PRECISION_DTYPES[cfg.precision]
        torch.manual_seed(seed)
        init_process_group(
            device=self.device,
            rank=rank,
            world_size=world_size,
            master_addr=master_addr,
            master_port=master_port,
            timeout_s=timeout_s,
        )
        self._exchange = RankExchange.of_default_group()
        is_short = self.device.type == "cpu" and cfg.max_total_sequence_length <= CPU_EAGER_TOKENS
        attention = "eager" if is_short else None
        self.mesh = make_mesh(self.device.type, world_size, tensor_parallel_size)
        self.shard_options = ShardOptions(
            compute_dtype=self.dtype,
            attention=attention,
            activation_checkpointing=cfg.dtensor_cfg.activation_checkpointing,
            torch_compile=cfg.dtensor_cfg.torch_compile,
            cpu_offload=cfg.dtensor_cfg.cpu_offload,
            freeze_vision_tower=cfg.freeze_vision_tower,
            lora=cfg.dtensor_cfg.lora_cfg.if_enabled,
            seed=seed,
        )
        self.model, self.export_plan = load_sharded_model(model_folder, self.mesh, self.shard_options)
        self.optimizer = make_optimizer(self.model.parameters(), cfg.optimizer)
        self.scheduler = make_scheduler(self.optimizer, cfg.scheduler)
        frozen = dataclasses.replace(
            self.shard_options,
            master_dtype=self.dtype,
            trainable=False,
            activation_checkpointing=False,
            torch_compile=False,
        )
        needs_copy = loss_needs_reference and self.shard_options.lora is None
        self.reference = load_sharded_model(model_folder, self.mesh, frozen)[0] if needs_copy else None
        logger.info("rank %d of %d holds its shard of %s", rank, world_size, model_folder)

    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        return BatchedDataDict(logprobs=self._logprobs(self.model, data))

    def get_reference_policy_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        if self.shard_options.lora is not None:
            with adapters_off(self.model):
                return BatchedDataDict(reference_logprobs=self._logprobs(self.model, data))
        if self.reference is None:
            raise AssertionError("no reference policy is held: the worker was made with loss_needs_reference=False")
        return BatchedDataDict(reference_logprobs=self._logprobs(self.reference, data))

    def train(self, data: BatchedDataDict, loss_fn: LossFunction) -> TrainResult:
        """One optimizer step per `train_global_batch_size / num_shards` samples of this rank, in their order."""
        num_rows = self.cfg.train_global_batch_size // self.num_shards
        if data.size == 0 or data.size % num_rows:
            raise ValueError(
                f"policy.train_global_batch_size: got {data.size} samples on a rank; allowed multiples of {num_rows}"
            )
        self._prepared = None
        self._held = {name: one for name, one in self._held.items() if not one.requires_grad}
        return mean_result([self._train_step(part, loss_fn) for part in data.make_microbatch_iterator(num_rows)])

    def export_hf(self, folder: str) -> None:
        """Write model and tokenizer; no rank returns before the folder is whole."""
        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer_folder) if self.tokenizer_folder else None
        try:
            export_hf(self.model, self.export_plan, tokenizer, folder, self.dtype)
            if dist.get_rank() == 0:
                copy_processor(self.model_folder, folder)
        finally:
            dist.barrier()  # also when rank 0 cannot write: the others wait here

    def export_adapter(self, folder: str, base: str) -> None:
        """Write the adapters as a peft folder; no rank returns before it is whole."""
        if self.shard_options.lora is None:
            raise AssertionError("there is no adapter: policy.dtensor_cfg.lora_cfg.enabled is false")
        try:
            export_adapter(self.model, self.export_plan, self.shard_options.lora, folder, base, self.device)
        finally:
            dist.barrier()  # also when rank 0 cannot write: the others wait here

    def free_memory_bytes(self) -> int:
        return free_memory_bytes(self.device)

    def connect_sglang_rollout_engines_distributed(
        self,
        *,
        rollout_engines: Sequence[Receiver],
        engine_gpu_counts: list[int],
        group_name: str,
        limit_s: float | None = None,
    ) -> None:
        """Make the weight-update group: rank 0 of the trainers and every engine rank. One that there is ends first.

        Args:
            limit_s: what is left of the caller's deadline; None: `refit_timeout_s`.

        Raises:
            TransferError: on every rank, when an engine refuses or the group does not form in time.
        """
        deadline = self._deadline(limit_s)

        def connect() -> WeightUpdateGroup:
            self._part_from_old_group(deadline)
            self._engines = rollout_engines
            return connect_rollout_engines_from_distributed(
                rollout_engines=rollout_engines,
                engine_gpu_counts=engine_gpu_counts,
                group_name=group_name,
                backend=self._server_cfg.weight_update_backend or default_backend(self.device),
                master_address=self.master_addr,
                deadline=deadline,
            )

        self._held, self._prepared = {}, None
        self._update_group = on_rank0(connect, self._exchange, deadline)

    def prepare_weight_update(self, *, ticket: str, buffer_size_bytes: int, limit_s: float | None = None) -> None:
        """Gather the first bucket, which needs no engine: they may still be generating.

        `update_weights_to_sglang_distributed` goes on from there when it is given this ticket and size.
        """
        try:
            walk = self._begin_refit(buffer_size_bytes, self._deadline(limit_s), negated=False)
            self._prepared = (ticket, buffer_size_bytes, False), walk
        except TransferError as error:  # on every rank; the refit begins anew, and raises what is wrong
            logger.warning("%s", error)

    def update_weights_to_sglang_distributed(
        self,
        *,
        rollout_engines: Sequence[Receiver],
        buffer_size_bytes: int,
        rollout_engine_lock: Any = None,
        target_precision: str = "bf16",
        sglang_quantization_cfg: Mapping[str, Any] | None = None,
        negated: bool = False,
        ticket: str | None = None,
        limit_s: float | None = None,
    ) -> RefitStats:
        """Gather every weight, bucket by bucket; rank 0 sends each bucket to every engine.

        From the second refit of a group on, tensors that are made of frozen parameters alone are left out.

        Args:
            ticket: of a `prepare_weight_update` since when no weight has changed.
            limit_s: what is left of the caller's deadline; None: `refit_timeout_s`.

        Raises:
            TransferError: on every rank, with one reason; the group is then gone.
        """
        if TARGET_DTYPES[target_precision] != self.dtype:
            raise ValueError(
                f"target_precision: got {target_precision!r}; allowed: that of policy.precision, {self.dtype}"
            )
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == (ticket, buffer_size_bytes, negated):
            walk = prepared[1]
        else:
            del prepared
            walk = self._begin_refit(buffer_size_bytes, self._deadline(limit_s), negated=negated)
        self._held = {}
        group, manifest, deadline = self._update_group, walk.manifest, walk.deadline
        sender = BucketSender(rollout_engines, group, manifest, deadline, walk.timeline) if group is not None else None
        try:
            stats = broadcast_hf_buckets_via_distributed_impl(
                bucket_iterator=walk,
                rollout_engines=rollout_engines,
                sender=sender,
                exchange=self._exchange,
                deadline=deadline,
            )
        except TransferError:
            self._update_group = self._buffers = None
            raise
        if self._state is not None and not negated:
            self._held = self._state.frozen()
        return stats

    def disconnect_sglang_rollout_engines_distributed(self, *, limit_s: float | None = None) -> None:
        """Take the weight-update group down on both sides. Idempotent.

        Args:
            limit_s: what is left of the caller's deadline; None: `refit_timeout_s`.

        Raises:
            TransferError: on every rank, when an engine does not let go of it.
        """
        self._prepared = None
        deadline = self._deadline(limit_s)
        on_rank0(lambda: self._disconnect(deadline), self._exchange, deadline)

    def shutdown(self) -> None:
        """Leave the trainers' group. Idempotent."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _begin_refit(self, buffer_size_bytes: int, deadline: Deadline, *, negated: bool) -> RefitWalk:
        """Up to the first bucket. Raises TransferError on every rank; what a gather raises, the walk raises."""
        plan = self.refit_plan()
        layouts = bucket_layouts(plan.manifest, buffer_size_bytes)
        buffers = on_rank0(lambda: self._refit_buffers(layouts), self._exchange, deadline)
        timeline = Timeline(self.device)
        tensors = dtensor_params_generator(
            self.model,
            plan,
            state=self._state,
            layouts=layouts,
            buffers=buffers,
            device=self.device,
            negated=negated,
            timeline=timeline,
        )
        return RefitWalk(tensors, buffer_size_bytes, plan.manifest, timeline, deadline)

    def _refit_buffers(self, layouts: Sequence[BucketLayout]) -> FlatBuffers:
        """Whatever may fail on rank 0 before the first gather."""
        if self._update_group is None:
            raise TransferError(
                "there is no weight-update group: connect_sglang_rollout_engines_distributed comes first"
            )
        buffers = self._buffers
        if buffers is None or not buffers.fit(layouts):
            buffers = FlatBuffers(layouts, self.device)
        # On the CPU new pages cost as much time as a gather; on a GPU training wants the memory.
        self._buffers = buffers if self.device.type == "cpu" else None
        return buffers

    def refit_plan(self) -> ExportPlan:
        """Of the next refit: without what is made alone of parameters that are frozen and that the engines hold."""
        frozen = self._current_state().frozen()
        # What was frozen since, or is another object, may have other values than the engines.
        return self.export_plan.without({name for name, one in frozen.items() if self._held.get(name) is one})

    def _current_state(self) -> ModelState:
        if self._state is None or not self._state.is_of(self.model):
            self._state = ModelState(self.model)
        return self._state

    def _disconnect(self, deadline: Deadline) -> None:
        group, self._update_group = self._update_group, None
        if group is not None:
            disconnect_rollout_engines_from_distributed(rollout_engines=self._engines, group=group, deadline=deadline)

    def _part_from_old_group(self, deadline: Deadline) -> None:
        """An engine of the old group may have been replaced, or hang: that is no reason not to make a new one."""
        try:
            self._disconnect(Deadline(min(_PART_S, deadline.remaining_s())))
        except TransferError as error:
            logger.warning("%s; a new group is made all the same", error)

    def _deadline(self, limit_s: float | None) -> Deadline:
        return Deadline(self._server_cfg.refit_timeout_s if limit_s is None else limit_s)

    def _logprobs(self, model: PreTrainedModel, data: BatchedDataDict) -> torch.Tensor:
        return compute_logprobs(
            model,
            data,
            micro_batch_size=self.cfg.logprob_batch_size or self.cfg.train_micro_batch_size,
            temperature=self.cfg.generation.temperature,
        )

    def _train_step(self, data: BatchedDataDict, loss_fn: LossFunction) -> TrainResult:
        return train_on_batch(
            self.model,
            self.optimizer,
            self.scheduler,
            data,
            loss_fn,
            micro_batch_size=self.cfg.train_micro_batch_size,
            temperature=self.cfg.generation.temperature,
            max_grad_norm=self.cfg.max_grad_norm,
            group=self.mesh.get_group(DP_AXIS),
        )


def mean_result(results: Sequence[TrainResult]) -> TrainResult:
    """Means over optimizer steps; the learning rate too."""
    count = len(results)
    return TrainResult(
        loss=sum(result.loss for result in results) / count,
        grad_norm=sum(result.grad_norm for result in results) / count,
        lr=sum(result.lr for result in results) / count,
        metrics={name: sum(result.metrics[name] for result in results) / count for name in results[0].metrics},
    )
