"""Every class of transformers' two mappings: manifest, stream and checkpoint are one and the same."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from stream_check import check_adapters, check_class, check_stream, single_rank_mesh
from tiny_models import ModelCase, all_cases, write_tiny_checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nemo_rl.models.policy.parallelize import DP_AXIS

CASES = {case.architecture: case for case in all_cases()}
TWO_RANKS = (
    "Qwen3MoeForCausalLM",  # fused experts
    "Glm4MoeForCausalLM",  # a float32 buffer
    "HrmTextForCausalLM",  # several module tensors in one of the checkpoint's
    "Kimi_K25ForConditionalGeneration",  # renamings that remember
    "Gemma3ForConditionalGeneration",  # tied, and a vision tower
    "MambaForCausalLM",  # blocks within blocks
    "Blip2ForConditionalGeneration",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    yield single_rank_mesh()
    dist.destroy_process_group()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_manifest_stream_and_file_are_equal(case: ModelCase, tmp_path: Path, mesh: DeviceMesh) -> None:
    report = check_class(case, tmp_path, mesh)
    assert report.differences == ()
    assert report.num_tensors > 3


@pytest.mark.parametrize(
    ("architecture", "exclude"),
    [
        ("HrmTextForCausalLM", []),  # several weights with an adapter in one of the checkpoint's tensors
        ("Glm4MoeForCausalLM", ["*.mlp.*"]),  # fused experts
        ("Gemma3ForConditionalGeneration", []),  # renamed, tied, and a vision tower
    ],
)
def test_adapters_change_what_they_are_on_and_nothing_else(
    architecture: str, exclude: list[str], tmp_path: Path, mesh: DeviceMesh
) -> None:
    write_tiny_checkpoint(CASES[architecture], tmp_path, seed=0)
    assert check_adapters(tmp_path, mesh, exclude) == ()


def two_ranks(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(DP_AXIS,))
    for architecture in TWO_RANKS:
        target = Path(folder) / architecture
        if rank == 0:
            write_tiny_checkpoint(CASES[architecture], target, seed=0)
        dist.barrier()
        report = check_stream(target, mesh)
        Path(folder, f"{architecture}-{rank}").write_text("\n".join(report.differences) or f"{report.num_tensors}")
    dist.destroy_process_group()


def test_the_stream_of_two_ranks_is_the_file() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(two_ranks, (folder,), nprocs=2)
        for architecture in TWO_RANKS:
            said = {Path(folder, f"{architecture}-{rank}").read_text() for rank in range(2)}
            assert len(said) == 1, (architecture, said)
            assert int(said.pop()) > 3
