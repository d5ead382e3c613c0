"""The wire over real gloo: what arrives, and that a fault is an error inside the deadline."""

import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_engine import GlooEngine, PerTensorEngine, manifest_of

from nemo_rl.distributed.weight_transfer.broadcast import broadcast_hf_buckets_via_distributed_impl
from nemo_rl.distributed.weight_transfer.buckets import BucketHeader, iter_named_tensor_buckets
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.errors import TransferError
from nemo_rl.distributed.weight_transfer.process_group import WeightUpdateGroup
from nemo_rl.distributed.weight_transfer.rank_exchange import RankExchange
from nemo_rl.distributed.weight_transfer.rollout_engines import (
    connect_rollout_engines_from_distributed,
    disconnect_rollout_engines_from_distributed,
)
from nemo_rl.distributed.weight_transfer.sender import BucketSender
from nemo_rl.utils.threads import on_thread


def weights() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 16), (3,), (5, 7), (1,), (64,)]
    named = [(f"w{i}", torch.randn(shape, generator=generator).bfloat16()) for i, shape in enumerate(shapes)]
    return [*named, ("bias", torch.randn(9, generator=generator))]


def connect(engines: list[GlooEngine], timeout_s: float = 20.0, name: str = "refit") -> WeightUpdateGroup:
    return connect_rollout_engines_from_distributed(
        rollout_engines=engines,
        engine_gpu_counts=[engine.num_ranks for engine in engines],
        group_name=name,
        backend="gloo",
        master_address="127.0.0.1",
        deadline=Deadline(timeout_s),
    )


def send_all(
    engines: list[GlooEngine], group: WeightUpdateGroup, buffer_size_bytes: int, timeout_s: float = 20.0
) -> BucketSender:
    manifest = manifest_of(weights())
    sender = BucketSender(engines, group, manifest, Deadline(timeout_s))
    for bucket in iter_named_tensor_buckets(weights(), buffer_size_bytes, manifest):
        sender.send(sender.prepare(bucket))
    sender.finish()
    return sender


@pytest.mark.parametrize("kind", [GlooEngine, PerTensorEngine])
@pytest.mark.parametrize("buffer_size_bytes", [1, 100, 10_000])
def test_every_tensor_arrives_bit_equal_on_every_engine(kind: type[GlooEngine], buffer_size_bytes: int) -> None:
    engines = [kind("engine 0"), kind("engine 1", num_ranks=2)]
    sender = send_all(engines, connect(engines), buffer_size_bytes)
    expected = dict(weights())
    for engine in engines:
        assert engine.received.keys() == expected.keys()
        for name, tensor in expected.items():
            assert engine.received[name].dtype == tensor.dtype
            assert torch.equal(engine.received[name], tensor)
    assert sender.stats.num_tensors == 6
    assert sender.stats.num_bytes == sum(tensor.nbytes for tensor in expected.values())
    assert sender.stats.num_buckets == len(engines[0].headers)


class SlowlyToldEngine(GlooEngine):
    """The announcement of bucket 0 takes long to reach it, those after it do not."""

    def announce(self, header: BucketHeader, group_name: str, timeout_s: float) -> Future[None]:
        if header.index > 0:
            return super().announce(header, group_name, timeout_s)

        def tell() -> None:
            time.sleep(0.3)
            super(SlowlyToldEngine, self).announce(header, group_name, timeout_s).result()

        return on_thread("tell", tell)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_an_engine_that_hears_late_of_one_bucket_does_not_take_it_for_the_next(late: int) -> None:
    """Of four gloo ranks, the last is served by another than rank 0, which is done before it has asked."""
    engines = [(SlowlyToldEngine if index == late else GlooEngine)(f"engine {index}") for index in range(3)]
    named = [("layers.0.w", torch.zeros(1000)), ("layers.1.w", torch.ones(1000))]
    sender = BucketSender(engines, connect(engines), manifest_of(named), Deadline(20))
    for item in named:
        sender.send(sender.prepare([item]))
    sender.finish()
    for engine in engines:
        assert {name: tensor[0].item() for name, tensor in engine.received.items()} == {
            "layers.0.w": 0,
            "layers.1.w": 1,
        }


@pytest.mark.parametrize(
    ("backend", "world_size", "num_bytes", "shows"),
    [
        ("gloo", 2, 1, True),
        ("gloo", 3, 1, True),
        ("gloo", 4, 10**9, False),
        ("nccl", 2, 2**28, False),
        ("nccl", 2, 2**28 + 1, True),
        ("nccl", 5, 2**30, False),
        ("nccl", 5, 2**30 + 1, True),
    ],
)
def test_when_the_end_of_a_broadcast_shows_that_all_receive(
    backend: str, world_size: int, num_bytes: int, shows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_BUFFSIZE", raising=False)
    group = WeightUpdateGroup(
        name="g", backend=backend, master_address="127.0.0.1", world_size=world_size, deadline=Deadline(5)
    )
    assert group.shows_arrival([torch.empty(num_bytes, dtype=torch.uint8, device="meta")]) is shows
    group.close()


def test_rank_offsets_follow_the_engines_sizes() -> None:
    engines = [GlooEngine("a", 1), GlooEngine("b", 2), GlooEngine("c", 1)]
    connect(engines)
    assert [engine.rank_offset for engine in engines] == [1, 2, 4]
    assert engines[0].group is not None
    assert engines[0].group.world_size == 5


def test_three_groups_in_a_row_on_fresh_ports() -> None:
    engines = [GlooEngine("a")]
    ports = set()
    for number in range(3):
        group = connect(engines, name=f"refit_{number}")
        send_all(engines, group, 100)
        ports.add(group.spec.master_port)
        disconnect_rollout_engines_from_distributed(rollout_engines=engines, group=group, deadline=Deadline(5))
    assert len(ports) == 3


def refuse(text: str) -> None:
    raise RuntimeError(text)


def test_an_engine_that_refuses_to_join_is_told_at_once_and_by_name() -> None:
    engines = [GlooEngine("engine 0"), GlooEngine("engine 1", on_join=lambda: refuse("no such backend"))]
    start_s = time.monotonic()
    with pytest.raises(TransferError, match="engine 1 did not join the weight-update group: no such backend"):
        connect(engines, timeout_s=6.0)
    assert time.monotonic() - start_s < 5.0


def test_an_engine_that_never_joins_ends_at_the_deadline() -> None:
    released = threading.Event()
    engines = [GlooEngine("engine 0"), GlooEngine("engine 1", on_join=lambda: released.wait(10) and None)]
    with pytest.raises(TransferError, match="not formed within 1 s; waiting for engine 1; no weight was sent"):
        connect(engines, timeout_s=1.0)
    released.set()


def test_a_bucket_refused_before_it_is_received_does_not_hold_the_sender() -> None:
    engine = GlooEngine("engine 0", on_bucket=lambda index: refuse("Unaligned received tensor") if index == 2 else None)
    group = connect([engine])
    start_s = time.monotonic()
    with pytest.raises(TransferError, match=r"engine 0 failed at bucket 2 \(.*\): Unaligned received tensor"):
        send_all([engine], group, 100)
    assert time.monotonic() - start_s < 5.0
    group.close()


class FailsWhenLookedAt(Future[None]):
    """Not done at the first look, failed at the second."""

    def done(self) -> bool:
        is_done = super().done()
        if not is_done:
            self.set_exception(RuntimeError("no memory to load it"))
        return is_done


class LateEngine(GlooEngine):
    def announce(self, header: BucketHeader, group_name: str, timeout_s: float) -> Future[None]:
        super().announce(header, group_name, timeout_s)
        return FailsWhenLookedAt()


def test_a_failure_between_two_looks_at_an_answer_is_heard() -> None:
    engine = LateEngine("engine 0")
    group = connect([engine])
    with pytest.raises(TransferError, match=r"engine 0 failed at bucket 0 \(.*\): no memory to load it"):
        send_all([engine], group, 10_000)
    group.close()


def test_an_engine_that_never_answers_ends_at_the_deadline() -> None:
    released = threading.Event()
    engine = GlooEngine("engine 0", on_bucket=lambda index: released.wait(10) and None)
    group = connect([engine])
    with pytest.raises(TransferError, match=r"engine 0 did not answer for bucket 0 \(.*\) within 1 s"):
        send_all([engine], group, 100, timeout_s=1.0)
    group.close()
    released.set()


def trainer_rank(rank: int, folder: str, fails_at: int, planned: list[tuple[str, torch.Tensor]]) -> None:
    """Two trainer ranks whose bucket iterator gathers; rank 0 sends."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    walked = []

    def gathered():  # type: ignore[no-untyped-def]
        for name, tensor in weights():
            parts = [torch.empty_like(tensor) for _ in range(2)]
            dist.all_gather(parts, tensor)
            walked.append(name)
            yield name, parts[0]

    manifest, sender = manifest_of(planned), None
    if rank == 0:
        engine = GlooEngine("engine 0", on_bucket=lambda index: refuse("disk full") if index == fails_at else None)
        sender = BucketSender([engine], connect([engine]), manifest, Deadline(20))
    try:
        stats = broadcast_hf_buckets_via_distributed_impl(
            bucket_iterator=iter_named_tensor_buckets(gathered(), 100, manifest),
            rollout_engines=[],
            sender=sender,
            exchange=RankExchange.of_default_group(),
            deadline=Deadline(20),
        )
        outcome = f"sent {stats.num_tensors}"
    except TransferError as error:
        outcome = str(error)
    Path(folder, f"rank{rank}").write_text(f"{outcome}|{len(walked)}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("fails_at", [-1, 0, 3])
def test_every_rank_walks_it_all_and_ends_alike(tmp_path: Path, fails_at: int) -> None:
    torch.multiprocessing.spawn(trainer_rank, (str(tmp_path), fails_at, weights()), nprocs=2)
    outcomes = {(tmp_path / f"rank{rank}").read_text() for rank in range(2)}
    (outcome,) = outcomes
    said, walked = outcome.rsplit("|", 1)
    assert walked == "6"
    if fails_at < 0:
        assert said == "sent 6"
    else:
        assert said.startswith(f"engine 0 failed at bucket {fails_at} (")
        assert ": disk full; these may hold a part of the new weights" in said


@pytest.mark.parametrize(
    ("planned", "message"),
    [
        ([*weights(), ("w9", torch.zeros(2))], "1 tensors of the manifest were not sent: w9"),
        (weights()[:-1], "bias was to be sent; the manifest does not hold it"),
        ([("w0", torch.zeros(8, 16)), *weights()[1:]], r"w0 was to be sent as [8, 16] torch.bfloat16; "),
        ([("old", torch.zeros(8, 16).bfloat16()), *weights()[1:]], "w0 was to be sent; the manifest does not hold it"),
    ],
    ids=["absent", "extra", "dtype", "renamed"],
)
def test_a_walk_that_is_not_the_plan_fails_by_name_on_every_rank(
    tmp_path: Path, planned: list[tuple[str, torch.Tensor]], message: str
) -> None:
    torch.multiprocessing.spawn(trainer_rank, (str(tmp_path), -1, planned), nprocs=2)
    (outcome,) = {(tmp_path / f"rank{rank}").read_text() for rank in range(2)}
    assert outcome.startswith(message)
    assert outcome.endswith("|6")
