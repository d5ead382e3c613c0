"""Tensor parallelism on 2 ranks, and FSDP2 over it on 4, against a plain single process in float32: 1e-5, as for FSDP2."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import policy_cases as cases
import pytest
import torch
from safetensors.torch import load_file
from test_fsdp_parity import check_weights, train_plain
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from nemo_rl.models.policy.export import dtensor_params_generator
from nemo_rl.models.policy.tensor_parallel import check_tensor_parallel
from nemo_rl.models.policy.workers.dtensor_policy_worker_v2 import DTensorPolicyWorkerV2

NUM_STREAMS = 5
PAD_TOKEN_ID = 70
"""In the second half of the vocabulary, and in the batches: its row of the embedding gets no gradient."""


def llama_config(tied: bool) -> PretrainedConfig:
    """Biases where a row-parallel product must add them once; grouped heads; 33 and 32 rows of the head per rank of 4."""
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=130,
        tie_word_embeddings=tied,
        attention_bias=True,
        mlp_bias=True,
        pad_token_id=PAD_TOKEN_ID,
        initializer_range=0.1,
    )


def moe_config() -> PretrainedConfig:
    """Five experts: FSDP2 shards them unevenly."""
    return Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=130,
        num_experts=5,
        num_experts_per_tok=2,
        initializer_range=0.1,
    )


CONFIGS = {
    "llama_tied": llama_config(tied=True),
    "llama_untied": llama_config(tied=False),
    "qwen3_tied": cases.dense_config(tied=True),
    "qwen3_moe": moe_config(),
}


@dataclass(frozen=True)
class Run:
    name: str
    folder: str
    world_size: int
    port: int
    checkpointing: bool = False


def train_run(run: Run, rank: int) -> dict[str, Any]:
    """Streams before training, three steps, streams afterwards."""
    torch.set_num_threads(1)
    cfg = cases.policy_config(tensor_parallel=2, micro_batch=2, checkpointing=run.checkpointing)
    worker = cases.make_worker(run.folder, cfg, rank=rank, world_size=run.world_size, port=run.port)
    num_shards = run.world_size // 2
    parts = [cases.make_batch(seed).shard_by_batch_size(num_shards)[rank // 2] for seed in range(cases.NUM_STEPS)]
    seen = {
        "loaded": streams(worker),
        "before": worker.get_logprobs(parts[0])["logprobs"],
        "results": [worker.train(part, cases.WeightedLoss()) for part in parts],
        "after": worker.get_logprobs(parts[0])["logprobs"],
        "reference": worker.get_reference_policy_logprobs(parts[0])["reference_logprobs"],
        "trained": streams(worker),
        "replicas": {
            name: parameter.to_local().detach().clone()
            for name, parameter in worker.model.named_parameters()
            if isinstance(parameter, DTensor) and not divided(parameter)
        },
        "num_divided": sum(divided(parameter) for parameter in worker.model.parameters()),
        "is_bad_step_refused": cases.bad_step_is_refused(worker, parts[0], rank),
    }
    worker.export_hf(f"{run.folder}-{run.world_size}-export")
    worker.shutdown()
    return seen


def divided(parameter: Any) -> bool:
    return parameter.device_mesh.ndim == 2 and not parameter.placements[1].is_replicate()


def streams(worker: DTensorPolicyWorkerV2) -> list[dict[str, torch.Tensor]]:
    return [
        {name: tensor.clone() for name, tensor in dtensor_params_generator(worker.model, worker.export_plan)}
        for _ in range(NUM_STREAMS)
    ]


def rank_main(rank: int, of_four: list[Run], of_pairs: tuple[list[Run], list[Run]], out_dir: str) -> None:
    """All ranks together, then each pair by itself."""
    seen = {(run.name, run.world_size): train_run(run, rank) for run in of_four}
    seen |= {(run.name, run.world_size): train_run(run, rank % 2) for run in of_pairs[rank // 2]}
    torch.save(seen, f"{out_dir}/rank{rank}.pt")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("tensor_parallel")
    return {name: cases.write_model(root / name, config) for name, config in CONFIGS.items()}


@pytest.fixture(scope="module")
def runs(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], list[Any]]:
    """(name, world size) -> what each rank saw."""
    out = tmp_path_factory.mktemp("ranks")

    def make(world_size: int, *names: str) -> list[Run]:
        return [Run(name, folders[name], world_size, cases.free_port(), world_size == 4) for name in names]

    of_pairs = (make(2, "llama_tied", "qwen3_moe"), make(2, "llama_untied", "qwen3_tied"))
    of_four = make(4, "llama_tied", "qwen3_moe")
    torch.multiprocessing.spawn(rank_main, (of_four, of_pairs, str(out)), nprocs=4)
    ranks = [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(4)]
    names = {name for rank in ranks for name in rank}
    return {name: [rank[name] for rank in ranks if name in rank] for name in sorted(names)}


@pytest.fixture(scope="module")
def plain(folders: dict[str, str]) -> dict[str, Any]:
    return {name: train_plain(folder, "float32") for name, folder in folders.items()}


RUNS = [*((name, 2) for name in CONFIGS), ("llama_tied", 4), ("qwen3_moe", 4)]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_three_tensor_parallel_steps_equal_the_plain_model(
    run: tuple[str, int], runs: dict[tuple[str, int], list[Any]], plain: dict[str, Any], folders: dict[str, str]
) -> None:
    expected = plain[run[0]]
    assert min(expected.grad_norms) > cases.MAX_GRAD_NORM
    for seen in runs[run]:
        assert [r.loss for r in seen["results"]] == pytest.approx(expected.losses, rel=1e-5, abs=1e-5)
        assert [r.grad_norm for r in seen["results"]] == pytest.approx(expected.grad_norms, rel=1e-5)
        assert seen["results"] == runs[run][0]["results"]
        assert seen["is_bad_step_refused"]
        assert seen["num_divided"] > 10
    model = AutoModelForCausalLM.from_pretrained(f"{folders[run[0]]}-{run[1]}-export")
    check_weights(dict(model.named_parameters()), expected, is_bf16=False)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_logprobs_of_a_divided_vocabulary_equal_those_of_the_whole(
    run: tuple[str, int], runs: dict[tuple[str, int], list[Any]], plain: dict[str, Any], folders: dict[str, str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders[run[0]], dtype=torch.float32).eval()
    num_shards = run[1] // 2
    parts = cases.make_batch(0).shard_by_batch_size(num_shards)
    for key, weights in (("before", plain[run[0]].start), ("after", plain[run[0]].weights)):
        model.load_state_dict(weights, strict=False)
        for rank, seen in enumerate(runs[run]):
            torch.testing.assert_close(seen[key], plain_logprobs(model, parts[rank // 2]), rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(seen["reference"], seen["before"], rtol=1e-6, atol=1e-6)


@torch.no_grad()
def plain_logprobs(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """`[batch, seq]` float32, 0 where there is no response token."""
    ids = batch["input_ids"]
    logprobs = torch.log_softmax(model(input_ids=ids).logits / cases.TEMPERATURE, -1)
    chosen = logprobs[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    mask = batch["token_mask"] * batch["sample_mask"][:, None]
    return torch.nn.functional.pad(chosen, (1, 0)) * mask


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_ranks_that_share_matrices_keep_equal_copies_of_the_rest(
    run: tuple[str, int], runs: dict[tuple[str, int], list[Any]]
) -> None:
    seen = [rank["replicas"] for rank in runs[run]]
    assert any(name.endswith("norm.weight") for name in seen[0])
    for first, second in zip(seen[::2], seen[1::2], strict=True):
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_five_streams_in_a_row_are_the_checkpoint_bit_by_bit(
    run: tuple[str, int], runs: dict[tuple[str, int], list[Any]], folders: dict[str, str]
) -> None:
    saved = load_file(Path(folders[run[0]]) / "model.safetensors")
    exported = load_file(Path(f"{folders[run[0]]}-{run[1]}-export") / "model.safetensors")
    for moment, expected in (("loaded", saved), ("trained", exported)):
        for stream in runs[run][0][moment]:
            assert stream.keys() == expected.keys()
            assert all(torch.equal(stream[name], expected[name]) for name in stream)
        assert all(tensor.is_meta for rank in runs[run][1:] for tensor in rank[moment][0].values())


@pytest.fixture
def on_meta() -> Iterator[Any]:
    with torch.device("meta"):
        yield AutoModelForCausalLM.from_config


@pytest.mark.parametrize(
    ("config", "size", "says"),
    [
        (
            llama_config(tied=True),
            4,
            r"must divide what LlamaForCausalLM has: num_key_value_heads = 2, .*allowed: 1, 2$",
        ),
        (
            Llama4TextConfig(num_hidden_layers=1),
            2,
            r"plan of Llama4ForCausalLM: .*experts\.gate_up_proj: packed_rowwise",
        ),
        (GptOssConfig(num_hidden_layers=1), 2, r"no tensor-parallel plan for GptOssForCausalLM; allowed: 1$"),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused(
    config: PretrainedConfig, size: int, says: str, on_meta: Any
) -> None:
    with pytest.raises(ValueError, match=rf"^policy\.dtensor_cfg\.tensor_parallel_size: got {size}; .*{says}"):
        check_tensor_parallel(on_meta(config), size)


def test_a_module_with_a_style_that_is_not_known_is_refused(on_meta: Any) -> None:
    model = on_meta(llama_config(tied=False))
    model.tp_plan["model.layers.*.mlp"] = "all_reduce"
    with pytest.raises(
        ValueError, match=r"not supported in the plan of LlamaForCausalLM: model\.layers\.\*\.mlp: all_"
    ):
        check_tensor_parallel(model, 2)
