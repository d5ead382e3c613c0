"""The wire on GPUs: weights there and back, what waits for what, when a bucket may be overwritten, and memory.

From one trainer rank that shares its GPU with the engine, over gloo and NCCL; and from two ranks over NCCL, of which the
second shares its GPU with the engine.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from gpu_recording import TRAINERS, Recording, RecordingWorker, Watch
from gpu_stack import ROOT, SERVER, TIMEOUT_S, checksums, checksums_of, send, started
from transformers import PretrainedConfig, Qwen3Config

from nemo_rl.algorithms.grpo import Participants

sys.path.append(str(ROOT / "tests/families"))
from family import Family, write_checkpoint

pytestmark = pytest.mark.gpu

BUCKET_BYTES = 8_000_000
ROUNDING_BYTES = 4 * 2**20
"""CUDA's memory comes in blocks that may be a MiB larger than asked, and a refit holds three or four of them."""
NUM_REFITS = 20
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def make_config() -> PretrainedConfig:
    """172 MB in bfloat16, more than twenty buckets; the largest tensor has 4.2 MB."""
    return Qwen3Config(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=32,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype=torch.bfloat16,
    )


@dataclass(frozen=True)
class Wire:
    run: Participants
    folders: list[Path]
    """Two checkpoints; the run began with the first."""
    num_ranks: int

    def refit(self, watched: Watch | None = None) -> tuple[dict[str, str], list[Recording]]:
        """The engine's checksums after it, and of one that is watched what each rank recorded."""
        workers = self.run.policy.workers
        workers.run("watch", timeout_s=TIMEOUT_S, watched=watched or Watch(records=False))
        self.run.synchronizer.sync_weights()
        recordings = workers.run("recording", timeout_s=TIMEOUT_S) if watched else []
        return checksums(self.run), recordings

    def move_weights(self) -> None:
        self.run.policy.workers.run("move_weights", timeout_s=TIMEOUT_S)


def changed(before: dict[str, str], after: dict[str, str]) -> bool:
    """Whether nearly every tensor has: an engine may hold some that no refit writes."""
    return sum(after[name] != before[name] for name in before) > 0.9 * len(before)


@pytest.fixture(
    scope="module",
    params=[(1, "gloo"), (1, "nccl"), pytest.param((2, "nccl"), marks=two_gpus)],
    ids=["one_gpu_gloo", "one_gpu_nccl", "two_gpus"],
)
def wire(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    num_ranks, backend = request.param
    tmp_path = tmp_path_factory.mktemp("wire")
    folders = [tmp_path / name for name in ("w0", "w1")]
    for seed, folder in enumerate(folders):
        write_checkpoint(Family("Qwen3", "Qwen3ForCausalLM", make_config), folder, seed=seed)
    with started(
        tmp_path / "logs",
        f"cluster.gpus_per_node={num_ranks}",
        f"policy.model_name={folders[0]}",
        f"{SERVER}.weight_update_backend={backend}",
        f"{SERVER}.sglang_server_concurrency=8",
        f"policy.refit_buffer_size_gb={BUCKET_BYTES / 1e9}",
        "policy.tokenizer.chat_template=default",
        "data.prompt='{problem} = '",
        worker_class=RecordingWorker,
    ) as run:
        yield Wire(run, folders, num_ranks)


def test_weights_go_over_the_wire_and_back_bit_by_bit(wire: Wire) -> None:
    first = checksums(wire.run)
    sent = send(wire.run, wire.folders[1])
    assert wire.run.policy.workers.num_ranks == wire.num_ranks
    assert wire.run.synchronizer.metrics()["refit/buckets"] > 20
    assert sent.keys() == first.keys()
    assert changed(first, sent)
    assert send(wire.run, wire.folders[0]) == first
    assert checksums_of(wire.run, wire.folders[1]) == sent
    assert send(wire.run, wire.folders[1]) == sent


def test_all_ranks_gather_alike_and_each_gather_ends_before_its_broadcast(wire: Wire) -> None:
    plain, _ = wire.refit()
    watched, recordings = wire.refit(Watch())
    assert watched == plain
    assert [recording.messages == recordings[0].messages for recording in recordings] == [True] * wire.num_ranks
    assert len(recordings[0].messages) > 20
    gathers = [[one for one in recording.collectives if one.group == TRAINERS] for recording in recordings]
    broadcasts = [[one for one in recording.collectives if one.group != TRAINERS] for recording in recordings]
    assert [len(of_rank) for of_rank in broadcasts] == [recordings[0].num_buckets, *[0] * (wire.num_ranks - 1)]
    assert sum(one.num_bytes for one in broadcasts[0]) == wire.run.synchronizer.last_stats.num_bytes
    # What rank 0 receives is what the others send, in their order, and nothing else is asked for.
    assert {one.op for one in gathers[0]} <= {"irecv"}
    for of_rank in gathers[1:]:
        assert {one.op for one in of_rank} == {"isend"}
        assert [one.num_bytes for one in of_rank] == [one.num_bytes for one in gathers[0]]
    # Gathers on one stream of each rank, broadcasts on another, which waits.
    assert all(len({one.stream for one in of_rank}) <= 1 for of_rank in gathers)
    (stream,) = {one.stream for one in broadcasts[0]}
    assert stream not in {one.stream for one in gathers[0]}
    assert min(recordings[0].margins_ms) >= 0
    assert len(recordings[0].margins_ms) == recordings[0].num_buckets > 20


def test_a_broadcast_that_does_not_wait_for_its_gathers_is_seen(wire: Wire) -> None:
    _, recordings = wire.refit(Watch(waits=False))
    assert min(recordings[0].margins_ms) < 0
    wire.refit()


def test_a_refit_takes_two_buckets_and_a_message_at_most(wire: Wire) -> None:
    workers = wire.run.policy.workers
    wire.refit()
    workers.run("start_peak", timeout_s=TIMEOUT_S)
    wire.run.synchronizer.sync_weights()
    (extra, bound), *others = workers.run("extra_bytes", timeout_s=TIMEOUT_S, bucket_bytes=BUCKET_BYTES)
    assert wire.run.synchronizer.last_stats.num_bytes > 20 * BUCKET_BYTES
    assert BUCKET_BYTES < extra <= bound + ROUNDING_BYTES
    assert bound < 3 * BUCKET_BYTES
    for extra_of_rank, bound_of_rank in others:
        assert 0 < extra_of_rank <= bound_of_rank <= BUCKET_BYTES


def test_a_bucket_may_be_overwritten_and_dropped_as_soon_as_it_is_sent(wire: Wire) -> None:
    before, _ = wire.refit()
    for number in range(NUM_REFITS):
        wire.move_weights()
        sent, _ = wire.refit(Watch(overwrites="after", fresh=number % 2 == 1))
        plain, _ = wire.refit()
        assert sent == plain
        assert changed(before, plain)
        before = plain


def test_a_bucket_that_is_overwritten_too_early_is_seen(wire: Wire) -> None:
    plain, _ = wire.refit()
    sent, _ = wire.refit(Watch(overwrites="before"))
    assert changed(plain, sent)
    assert wire.refit()[0] == plain
