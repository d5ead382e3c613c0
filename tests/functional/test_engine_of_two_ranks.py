"""One real engine of tensor-parallel size 2, through the driver's handle."""

from pathlib import Path

import ray
import torch
from engine_config import make_policy_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl.config.layout import Layout
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, start_ray
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.models.generation.sglang.sglang_generation import SGLangGeneration


def test_it_samples_like_transformers_and_has_checksums_of_both_ranks(tiny_model_folder: Path, tmp_path: Path) -> None:
    config = make_policy_config(tiny_model_folder, server={"num_gpus_per_engine": 2})
    layout = Layout(num_nodes=1, num_train_slots=1, num_engines=1, num_slots_per_engine=2)
    generation = SGLangGeneration(cfg=config, layout=layout, device="cpu")
    start_ray(device="cpu", num_slots=3, num_nodes=1)
    try:
        cluster = RayVirtualCluster(name="engines", slots=[2], device="cpu")
        tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
        generation.launch(cluster, model_folder=tiny_model_folder, tokenizer=tokenizer, log_folder=tmp_path)
        generation.wait_ready()
        assert generation.engine_gpu_counts == [2]
        assert len(generation.rollout_engines) == 1
        ids = torch.randint(4, 99, (4, 12), generator=torch.Generator().manual_seed(0))
        batch = generation.generate(
            BatchedDataDict({"input_ids": ids, "input_lengths": torch.full((4,), 12)}), greedy=True
        )
        (digests,) = generation.weight_checksums(Deadline(60))
    finally:
        generation.shutdown()
        ray.shutdown()
    assert {name.partition("/")[0] for name in digests} == {"0", "1"}
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32).eval()
    for row in range(4):
        with torch.no_grad():
            expected = model.generate(
                ids[row : row + 1], max_new_tokens=24, do_sample=False, eos_token_id=2, pad_token_id=0
            )[0]
        end = int(batch["unpadded_sequence_lengths"][row])
        assert batch["output_ids"][row, :end].tolist() == expected.tolist()
