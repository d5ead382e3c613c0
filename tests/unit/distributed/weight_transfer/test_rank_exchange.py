"""How the trainer ranks end alike, also when one of them cannot go on."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_engine import GlooEngine, manifest_of

from nemo_rl.distributed.weight_transfer.broadcast import broadcast_hf_buckets_via_distributed_impl
from nemo_rl.distributed.weight_transfer.buckets import NamedTensor, iter_named_tensor_buckets
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.errors import TransferError, TransferFacts
from nemo_rl.distributed.weight_transfer.rank_exchange import Outcome, RankExchange, on_rank0
from nemo_rl.distributed.weight_transfer.rollout_engines import connect_rollout_engines_from_distributed
from nemo_rl.distributed.weight_transfer.sender import BucketSender


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_an_outcome_crosses_whole() -> None:
    facts = TransferFacts("engine 1", 3, ("a", "b"), "no memory", ("engine 0", "engine 1"), True)
    copy = Outcome.from_json(Outcome(TransferError("it failed", facts), ("engine 0",), (5, 2, 1)).to_json().encode())
    assert copy.error is not None
    assert (copy.error.what, copy.error.facts) == ("it failed", facts)
    assert (copy.announced, copy.sent) == (("engine 0",), (5, 2, 1))


def test_every_rank_hears_every_rank_and_the_store_does_not_grow(store: dist.TCPStore) -> None:
    exchanges = [RankExchange(store, rank, 3) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for number in range(5):
            said = [pool.submit(e.share, Outcome(sent=(number, e.rank, 0)), 10.0) for e in exchanges]
            for outcomes in said:
                assert [o and o.sent for o in outcomes.result()] == [(number, rank, 0) for rank in range(3)]
    assert sum("nemo_rl_rank_exchange" in key for key in store.list_keys()) == 3


def test_a_rank_that_says_nothing_is_named_at_the_deadline(store: dist.TCPStore) -> None:
    start_s = time.monotonic()
    with pytest.raises(TransferError, match=r"trainer ranks \[1\] did not follow within 0\.5 s"):
        on_rank0(lambda: None, RankExchange(store, 0, 2), Deadline(0.5))
    assert time.monotonic() - start_s < 5.5


def test_the_reason_of_rank_0_reaches_the_others(store: dist.TCPStore) -> None:
    def refuse() -> None:
        raise TransferError("engine 1 did not join", TransferFacts(engines_failed=("engine 1",)))

    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(on_rank0, refuse, RankExchange(store, rank, 2), Deadline(10)) for rank in range(2)]
        for rank in ranks:
            error = rank.exception()
            assert isinstance(error, TransferError)
            assert str(error) == "engine 1 did not join; no weight was sent; replace engine 1"


def weights() -> list[NamedTensor]:
    return [(f"w{i}", torch.full((64,), float(i))) for i in range(6)]


def trainer_rank(rank: int, port: int, folder: str, raises_at: int, raising_rank: int) -> None:
    """Two ranks whose iterator gathers; on one of them it raises, at the end for `raises_at` 6."""
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=2)

    def gathered() -> Iterator[NamedTensor]:
        for index, (name, tensor) in enumerate([*weights(), ("end", torch.zeros(1))]):
            if index == raises_at and rank == raising_rank:
                raise MemoryError("no memory for the gather")
            if name != "end":
                parts = [torch.empty_like(tensor) for _ in range(2)]
                dist.all_gather(parts, tensor)
                yield name, parts[0]

    manifest, sender = manifest_of(weights()), None
    engine = GlooEngine("engine 0")
    if rank == 0:
        group = connect_rollout_engines_from_distributed(
            rollout_engines=[engine],
            engine_gpu_counts=[1],
            group_name="refit",
            backend="gloo",
            master_address="127.0.0.1",
            deadline=Deadline(20),
        )
        sender = BucketSender([engine], group, manifest, Deadline(20))
    start_s = time.monotonic()
    try:
        broadcast_hf_buckets_via_distributed_impl(
            bucket_iterator=iter_named_tensor_buckets(gathered(), 1, manifest),
            rollout_engines=[engine],
            sender=sender,
            exchange=RankExchange.of_default_group(),
            deadline=Deadline(20),
        )
    except TransferError as error:
        Path(folder, f"rank{rank}").write_text(f"{time.monotonic() - start_s:.1f}|{error.engines_failed}|{error}")


@pytest.mark.parametrize("raising_rank", [0, 1])
@pytest.mark.parametrize("raises_at", [2, 6], ids=["while others gather", "after the last gather"])
def test_an_iterator_that_raises_on_one_rank_ends_both_with_its_words(
    store: dist.TCPStore, tmp_path: Path, raising_rank: int, raises_at: int
) -> None:
    """While others gather, what ends them is that the rank's process ends."""
    torch.multiprocessing.spawn(trainer_rank, (store.port, str(tmp_path), raises_at, raising_rank), nprocs=2)
    for rank in range(2):
        seconds, failed, text = (tmp_path / f"rank{rank}").read_text().split("|", 2)
        assert float(seconds) < 6.0
        assert failed == "('engine 0',)"
        assert f"trainer rank {raising_rank}: MemoryError: no memory for the gather" in text
        assert "may hold a part of the new weights" in text
