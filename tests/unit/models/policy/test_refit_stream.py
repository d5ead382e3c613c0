"""What three trainer ranks stream to an engine: one order of gathers, one bucket ahead of the wire, all of it or an error."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import policy_cases as cases
import pytest
import torch
import torch.distributed as dist
from gloo_engine import GlooEngine
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from nemo_rl.distributed.weight_transfer.broadcast import broadcast_hf_buckets_via_distributed_impl
from nemo_rl.distributed.weight_transfer.buckets import FlatBuffers, bucket_layouts
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.errors import TransferError
from nemo_rl.distributed.weight_transfer.rank_exchange import RankExchange
from nemo_rl.distributed.weight_transfer.rollout_engines import connect_rollout_engines_from_distributed
from nemo_rl.distributed.weight_transfer.sender import BucketSender
from nemo_rl.distributed.weight_transfer.timeline import Span, Timeline
from nemo_rl.models.policy import gather
from nemo_rl.models.policy.conversions import TensorGroup
from nemo_rl.models.policy.export import dtensor_params_generator
from nemo_rl.models.policy.export_plan import ExportPlan
from nemo_rl.models.policy.parallelize import ShardOptions, load_sharded_model
from nemo_rl.models.policy.refit_walk import RefitWalk

NUM_RANKS = 3
BUCKET_BYTES = 10_000
"""The largest bucket is larger: an expert stack's pieces stay apart, the embedding does not."""
CPU = torch.device("cpu")


class Gathers:
    """Records the messages of this rank, and says when a bucket's gathers begin."""

    def __init__(self) -> None:
        self.messages: list[list[tuple[tuple[int, ...], str]]] = []
        self._gather_message = gather._gather_message
        gather._gather_message = self

    def __call__(self, gathers: list[gather.Gather], device: torch.device) -> None:
        self.messages.append([(tuple(one.value.shape), str(one.dtype)) for one in gathers])
        self._gather_message(gathers, device)

    def take(self) -> list[list[tuple[tuple[int, ...], str]]]:
        taken, self.messages = self.messages, []
        return taken


class BrokenGroup(TensorGroup):
    def to_checkpoint(self, *arguments: Any) -> dict[str, torch.Tensor]:
        raise ArithmeticError("cannot be converted")


def rank_main(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    gathers, exchange = Gathers(), RankExchange.of_default_group()
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("dp_shard",))
    model, plan = load_sharded_model(f"{folder}/model", mesh, ShardOptions(compute_dtype=torch.bfloat16))
    seen = {"whole": refit(model, plan, gathers, exchange)}
    broken = [BrokenGroup(**vars(group)) if group.converter is not None else group for group in plan.groups]
    seen["broken"] = refit(model, replace(plan, groups=tuple(broken)), gathers, exchange)
    frozen = {name for name, _ in model.named_parameters() if "experts" in name or "embed" in name}
    seen["frozen"] = refit(model, plan.without(frozen), gathers, exchange)
    torch.save(seen, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def refit(model: Any, plan: ExportPlan, gathers: Gathers, exchange: RankExchange) -> dict[str, Any]:
    """Rank 0's engine receives bucket 0 only when bucket 1 is being gathered: without overlap it refuses."""
    layouts = bucket_layouts(plan.manifest, BUCKET_BYTES)
    second = threading.Event()
    engine, sender, timeline, deadline = None, None, Timeline(CPU), Deadline(30)
    if exchange.rank == 0:
        engine = GlooEngine("engine", on_bucket=lambda index: wait_for(second) if index == 0 else None)
        group = connect_rollout_engines_from_distributed(
            rollout_engines=[engine],
            engine_gpu_counts=[1],
            group_name="refit",
            backend="gloo",
            master_address="127.0.0.1",
            deadline=deadline,
        )
        sender = BucketSender([engine], group, plan.manifest, deadline, timeline)
    tensors = dtensor_params_generator(
        model,
        plan,
        layouts=layouts,
        buffers=FlatBuffers(layouts, CPU) if exchange.rank == 0 else None,
        timeline=timeline,
    )
    walk = RefitWalk(tensors, BUCKET_BYTES, plan.manifest, timeline, deadline)
    num_first = len(gathers.messages)
    error, stats = "", None
    try:
        stats = broadcast_hf_buckets_via_distributed_impl(
            bucket_iterator=tell(iter(walk), second.set),
            rollout_engines=[],
            sender=sender,
            exchange=exchange,
            deadline=deadline,
        )
    except TransferError as failure:
        error = str(failure)
    return {
        "messages": gathers.take(),
        "num_first": num_first,
        "error": error,
        "received": engine.received if engine else {},
        "num_buckets": stats.num_buckets if stats else 0,
        "spans": stats.spans if stats else (),
        "layouts": [[spec.name for spec in layout.specs] for layout in layouts],
    }


def wait_for(second: threading.Event) -> None:
    if not second.wait(20):
        raise RuntimeError("bucket 1 is not made while bucket 0 travels")


def tell(buckets: Iterator[Any], second_asked_for: Callable[[], None]) -> Iterator[Any]:
    for index, bucket in enumerate(buckets):
        yield bucket
        if index == 0:
            second_asked_for()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stream")
    cases.write_model(folder / "model", cases.moe_config())
    return folder


@pytest.fixture(scope="module")
def ranks(model_folder: Path) -> list[dict[str, Any]]:
    torch.multiprocessing.spawn(rank_main, (str(model_folder),), nprocs=NUM_RANKS)
    return [torch.load(model_folder / f"rank{rank}.pt", weights_only=False) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("case", ["whole", "broken", "frozen"])
def test_every_rank_gathers_the_same_in_the_same_order(case: str, ranks: list[dict[str, Any]]) -> None:
    messages = [rank[case]["messages"] for rank in ranks]
    assert messages[0]
    assert messages[1] == messages[0]
    assert messages[2] == messages[0]


def test_gathers_are_coalesced(ranks: list[dict[str, Any]]) -> None:
    messages = ranks[0]["whole"]["messages"]
    assert max(len(message) for message in messages) > 3
    assert len(messages) < sum(len(message) for message in messages) / 2


def test_the_engine_gets_what_the_checkpoint_holds(ranks: list[dict[str, Any]], model_folder: Path) -> None:
    seen, saved = ranks[0]["whole"], load_file(model_folder / "model/model.safetensors")
    assert seen["error"] == ""
    assert seen["num_buckets"] == len(seen["layouts"]) > 3
    assert seen["received"].keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(seen["received"][name], tensor.to(torch.bfloat16)), name


def test_a_bucket_is_whole_before_it_is_sent(ranks: list[dict[str, Any]]) -> None:
    spans: tuple[Span, ...] = ranks[0]["whole"]["spans"]
    lanes = {lane: [span for span in spans if span.lane == lane] for lane in ("gather", "broadcast", "load")}
    assert {len(of_lane) for of_lane in lanes.values()} == {ranks[0]["whole"]["num_buckets"]}
    for gathered, sent in zip(lanes["gather"], lanes["broadcast"], strict=True):
        assert gathered.bucket == sent.bucket
        assert gathered.end_s <= sent.start_s
    assert ranks[1]["whole"]["spans"] == ()


def test_a_conversion_that_fails_on_rank_0_is_told_to_all_after_the_last_gather(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["broken"]["messages"] == ranks[0]["whole"]["messages"]
    for rank in ranks:
        assert rank["broken"]["error"].startswith("trainer rank 0: ArithmeticError: cannot be converted")


@pytest.mark.parametrize("case", ["whole", "broken", "frozen"])
def test_the_first_bucket_alone_is_made_before_the_walk(case: str, ranks: list[dict[str, Any]]) -> None:
    num_first = [rank[case]["num_first"] for rank in ranks]
    assert 0 < num_first[0] < len(ranks[0][case]["messages"])
    assert num_first == [num_first[0]] * NUM_RANKS


def test_what_is_made_of_frozen_parameters_alone_is_left_out(ranks: list[dict[str, Any]]) -> None:
    whole, part = ranks[0]["whole"]["received"], ranks[0]["frozen"]["received"]
    left_out = {name for name in whole if "experts" in name or "embed" in name}
    assert left_out
    assert part.keys() == whole.keys() - left_out
    assert all(torch.equal(part[name], whole[name]) for name in part)
