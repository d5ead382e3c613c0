"""The program of a trainer rank: three steps in a shape, and what was seen."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import policy_cases as cases
import torch
from plain import make_batch
from shapes import Shape
from torch.distributed.tensor import DTensor

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.checkpoint import read_headers
from nemo_rl.models.policy.export import dtensor_params_generator
from nemo_rl.models.policy.export_plan import make_export_plan
from nemo_rl.models.policy.interfaces import TrainResult
from nemo_rl.models.policy.workers.dtensor_policy_worker_v2 import DTensorPolicyWorkerV2

NUM_EXPORTS = 5


@dataclass(frozen=True)
class Run:
    """One shape on one checkpoint; every run has a process group of its own."""

    shape: Shape
    folder: str
    port: int
    compile_backend: str = "inductor"
    """`aot_eager`: the same graphs, forward and backward, without a minute of code generation."""

    @property
    def export_folder(self) -> str:
        return f"{self.folder}-{self.shape.name}-export"


@dataclass(frozen=True)
class Seen:
    """What one rank saw; its part of the batch."""

    before: torch.Tensor
    """Log-probs of the first batch, before any step."""
    after: torch.Tensor
    reference: torch.Tensor
    results: list[TrainResult]
    start: dict[str, torch.Tensor]
    """The stream before the first step, in float32; on meta beyond rank 0."""
    exports: list[dict[str, torch.Tensor]]
    """The stream after the last step, five times."""
    is_tied: bool
    inv_freq: torch.Tensor
    module_names: list[str]
    replicas: dict[str, torch.Tensor]
    """This rank's part of the parameters that are not divided between ranks that share matrices."""
    num_divided: int
    """Those that are."""
    is_bad_step_refused: bool

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return self.exports[0]


def train_run(run: Run, rank: int) -> Seen:
    """Three steps as this rank."""
    torch.set_num_threads(1)
    with mock.patch("torch.compile", partial(torch.compile, backend=run.compile_backend)):
        return _train_run(run, rank)


def _train_run(run: Run, rank: int) -> Seen:
    shape = run.shape
    cfg = cases.policy_config(precision=shape.precision, micro_batch=shape.micro_batch, dtensor=shape.settings)
    worker = cases.make_worker(run.folder, cfg, rank=rank, world_size=shape.num_ranks, port=run.port)
    parts = [
        make_batch(shape, step).shard_by_batch_size(shape.num_data_ranks)[data_rank(shape, rank)]
        for step in range(cases.NUM_STEPS)
    ]
    before, start = worker.get_logprobs(parts[0])["logprobs"], stream(worker, run)
    results = [worker.train(part, cases.WeightedLoss()) for part in parts]
    model = worker.model
    seen = Seen(
        before=before,
        after=worker.get_logprobs(parts[0])["logprobs"],
        reference=worker.get_reference_policy_logprobs(parts[0])["reference_logprobs"],
        results=results,
        start=start,
        exports=[stream(worker, run) for _ in range(NUM_EXPORTS)],
        is_tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        inv_freq=model.get_buffer("model.rotary_emb.inv_freq").clone(),
        module_names=[name for name, _ in model.named_modules()],
        replicas={
            name: shard.to_local().detach().clone()
            for name, shard in model.named_parameters()
            if isinstance(shard, DTensor) and not is_divided(shard)
        },
        num_divided=sum(isinstance(shard, DTensor) and is_divided(shard) for shard in model.parameters()),
        is_bad_step_refused=bad_step_is_refused(worker, parts[0], rank),
    )
    worker.export_hf(run.export_folder)
    worker.shutdown()
    return seen


def is_divided(shard: DTensor) -> bool:
    """Between ranks that share matrices."""
    return shard.device_mesh.ndim == 2 and not shard.placements[1].is_replicate()


def data_rank(shape: Shape, rank: int) -> int:
    """Which part of the batch is this rank's; ranks that share matrices are neighbours."""
    return rank * shape.num_data_ranks // shape.num_ranks


def stream(worker: DTensorPolicyWorkerV2, run: Run) -> dict[str, torch.Tensor]:
    """What a refit would send, but in float32, whatever the precision of the shape."""
    exact = make_export_plan(worker.export_plan.twin, read_headers(Path(run.folder)), torch.float32)
    return {name: tensor.clone() for name, tensor in dtensor_params_generator(worker.model, exact)}


def bad_step_is_refused(worker: DTensorPolicyWorkerV2, part: BatchedDataDict, rank: int) -> bool:
    """A nan on rank 0 alone must stop every rank before its weights change."""
    bad = BatchedDataDict(part)
    if rank == 0:
        bad["weights"] = part["weights"] * float("nan")
    before = [shard.detach().to_local().clone() for shard in worker.model.parameters()]
    try:
        worker.train(bad, cases.WeightedLoss())
    except FloatingPointError:
        after = [shard.detach().to_local() for shard in worker.model.parameters()]
        return all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    return False


def load_error(run: Run, rank: int) -> str:
    """What a rank raises when rank 0 cannot read the checkpoint."""
    try:
        cases.make_worker(run.folder, cases.policy_config(), rank=rank, world_size=run.shape.num_ranks, port=run.port)
    except ValueError as error:
        return str(error)
    return ""


def rank_main(rank: int, runs: Sequence[Run], broken: Run | None, out_folder: str) -> None:
    """Entry point of a spawned rank: every run, then a checkpoint that cannot be read."""
    seen: dict[str, Any] = {run.shape.name: train_run(run, rank) for run in runs}
    if broken is not None:
        seen["broken"] = load_error(broken, rank)
    torch.save(seen, f"{out_folder}/rank{rank}.pt")


def spawn(runs: Sequence[Run], out_folder: Path, broken: Run | None = None) -> list[dict[str, Any]]:
    """Per rank: name of the shape -> `Seen`. All runs have the same number of ranks."""
    (num_ranks,) = {run.shape.num_ranks for run in runs}
    out_folder.mkdir(parents=True, exist_ok=True)
    torch.multiprocessing.spawn(rank_main, (runs, broken, str(out_folder)), nprocs=num_ranks)
    return [torch.load(out_folder / f"rank{rank}.pt", weights_only=False) for rank in range(num_ranks)]
