"""Two FSDP2 ranks and one real SGLang server: what a refit does to the engine, bit by bit."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl.algorithms.grpo import Participants
from nemo_rl.config.loader import load_config
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.errors import TransferError
from nemo_rl.models.generation.interfaces import EnginesLostError
from nemo_rl.setup import prepare_inputs, start_participants
from nemo_rl.utils.metrics import MetricsLogger
from nemo_rl.utils.run_folder import make_run_folder

ROOT = Path(__file__).parents[2]
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Participants]:
    """Started as a run starts them; the first refit is done."""
    config = load_config(
        ROOT / "examples/configs/grpo_tiny_cpu.yaml",
        [
            f"logger.log_dir={tmp_path_factory.mktemp('refit')}",
            "policy.max_total_sequence_length=512",
            "policy.generation.max_new_tokens=480",
            f"policy.generation.temperature={TEMPERATURE}",
            "policy.optimizer.kwargs.lr=0.02",
            "policy.refit_buffer_size_gb=0.0001",
            "loss_fn.reference_policy_kl_penalty=0.01",
        ],
    )
    folder = make_run_folder(config.logger.log_dir)
    with (
        MetricsLogger(folder.path, num_steps=1, tensorboard=False) as metrics,
        start_participants(config, prepare_inputs(config), folder, metrics) as participants,
    ):
        participants.synchronizer.init_communicator()
        participants.synchronizer.sync_weights()
        yield participants


def prompts(stack: Participants, num: int, length: int = 24) -> BatchedDataDict:
    ids = torch.randint(4, 100, (num, length), generator=torch.Generator().manual_seed(num))
    return BatchedDataDict({"input_ids": ids, "input_lengths": torch.full((num,), length)})


def train(stack: Participants) -> None:
    """Move the weights far away."""
    data = prompts(stack, 8)
    shape = data["input_ids"].shape
    data["token_mask"], data["sample_mask"] = torch.ones(shape), torch.ones(8)
    data["advantages"] = torch.linspace(-1, 1, 8)
    data["prev_logprobs"] = data["generation_logprobs"] = stack.policy.get_logprobs(data)["logprobs"]
    data["reference_logprobs"] = stack.policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    before = data["prev_logprobs"]
    stack.policy.train(data, stack.loss_fn)
    stack.synchronizer.mark_stale()
    assert (stack.policy.get_logprobs(data)["logprobs"] - before).abs().max() > 0.1


def checksums(stack: Participants) -> dict[str, str]:
    (digests,) = stack.generation.weight_checksums(Deadline(60))
    return digests


def test_a_refit_equals_loading_the_exported_folder_bit_by_bit(stack: Participants, tmp_path: Path) -> None:
    first = checksums(stack)
    train(stack)
    stack.synchronizer.sync_weights()
    sent = checksums(stack)
    assert sent.keys() == first.keys()
    assert all(sent[name] != first[name] for name in first)
    stack.policy.export_hf(str(tmp_path / "w1"))
    original = str(prepare_original())
    stack.generation.update_weights_from_disk(original, Deadline(60))
    assert checksums(stack) == first
    stack.generation.update_weights_from_disk(str(tmp_path / "w1"), Deadline(60))
    assert checksums(stack) == sent
    AutoModelForCausalLM.from_pretrained(tmp_path / "w1")


def test_what_was_gathered_for_a_refit_that_came_to_nothing_is_not_sent_later(
    stack: Participants, tmp_path: Path
) -> None:
    stack.policy.prepare_weight_update(buffer_size_bytes=stack.synchronizer._buffer_size_bytes)
    train(stack)
    stack.synchronizer.sync_weights()
    sent = checksums(stack)
    stack.policy.export_hf(str(tmp_path / "trained"))
    stack.generation.update_weights_from_disk(str(tmp_path / "trained"), Deadline(60))
    assert checksums(stack) == sent


def prepare_original() -> Path:
    from nemo_rl.models.model_source import resolve_model

    return resolve_model("tiny-random-qwen3")


def test_every_byte_of_the_model_travels_once(stack: Participants) -> None:
    stack.synchronizer.sync_weights()
    model = AutoModelForCausalLM.from_pretrained(prepare_original())
    expected = model.state_dict()
    metrics = stack.synchronizer.metrics()
    assert metrics["refit/tensors"] == len(expected)
    assert metrics["refit/bytes"] == sum(tensor.numel() * 4 for tensor in expected.values())
    assert metrics["refit/buckets"] > 3


def test_logprobs_of_trainer_and_engine_agree_after_a_refit(stack: Participants) -> None:
    train(stack)
    stack.synchronizer.sync_weights()
    out = stack.generation.generate(prompts(stack, 8))
    data = BatchedDataDict(input_ids=out["output_ids"], input_lengths=out["unpadded_sequence_lengths"])
    own = stack.policy.get_logprobs(data)["logprobs"]
    mask = out["logprobs"] != 0
    assert mask.sum() > 200
    assert (own - out["logprobs"])[mask].abs().mean() < 1e-3
    assert own[:, 0].abs().max() == 0


def test_samples_report_the_version_of_the_refit(stack: Participants) -> None:
    before = stack.synchronizer.metrics()["refit/weight_version"]
    for number in (1, 2):
        stack.synchronizer.sync_weights()
        assert stack.synchronizer.metrics()["refit/weight_version"] == before + number
        out = stack.generation.generate(prompts(stack, 2))
        assert out["weight_version"] == [str(before + number)] * 2


def generate_raw(stack: Participants, ids: list[int], **parameters: Any) -> dict[str, Any]:
    return generate_at(stack, stack.generation.rollout_engines[0].control.url, ids, **parameters)


def generate_at(stack: Participants, url: str, ids: list[int], **parameters: Any) -> dict[str, Any]:
    body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 8, **parameters}}
    answer: dict[str, Any] = httpx.post(
        f"{url}/generate", json=body, headers=stack.generation.keys.headers(admin=False), timeout=60
    ).json()
    return answer


def test_no_kv_entry_of_the_old_weights_is_used(stack: Participants, tmp_path: Path) -> None:
    ids = prompts(stack, 1, 300)["input_ids"][0].tolist()
    generate_raw(stack, ids)
    assert generate_raw(stack, ids)["meta_info"]["cached_tokens"] > 250
    train(stack)
    stack.synchronizer.sync_weights()
    after = generate_raw(stack, ids)
    assert after["meta_info"]["cached_tokens"] == 0
    stack.policy.export_hf(str(tmp_path / "now"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "now", dtype=torch.float32)
    fresh = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=2, pad_token_id=0)
    assert after["output_ids"] == fresh[0, len(ids) :].tolist()


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_a_refit_amid_long_generations(stack: Participants, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    server = stack.generation._server_cfg.model_copy(update={"pause_generation_mode": mode})
    monkeypatch.setattr(stack.generation, "_server_cfg", server)
    version = stack.synchronizer.metrics()["refit/weight_version"]
    ids = prompts(stack, 8)["input_ids"].tolist()
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(generate_raw, stack, row, max_new_tokens=400, ignore_eos=True) for row in ids]
        wait_until_running(stack, 8)
        stack.synchronizer.sync_weights()
        answers = [future.result(timeout=120) for future in running]
    reasons = {answer["meta_info"]["finish_reason"]["type"] for answer in answers}
    lengths = [len(answer["output_ids"]) for answer in answers]
    if mode == "retract":
        assert reasons == {"length"}
        assert lengths == [400] * 8
    else:
        assert reasons == {"abort"}
        assert all(length < 400 for length in lengths)
    assert stack.synchronizer.metrics()["refit/weight_version"] == version + 1
    assert generate_raw(stack, ids[0])["meta_info"]["weight_version"] == str(version + 1)


def wait_until_running(stack: Participants, num: int) -> None:
    url = stack.generation.rollout_engines[0].control.url
    for _ in range(200):
        loads = httpx.get(
            f"{url}/v1/loads",
            params={"include": "core"},
            headers=stack.generation.keys.headers(admin=False),
            timeout=10,
        ).json()["loads"]
        if sum(rank["num_running_reqs"] for rank in loads) >= num:
            return
        time.sleep(0.02)
    pytest.fail(f"{num} requests did not start")


def test_a_refused_bucket_fails_on_every_rank_and_the_engine_is_not_used_again(stack: Participants) -> None:
    version = stack.synchronizer.metrics()["refit/weight_version"]
    group_name = stack.policy._group_name
    (engine,) = stack.generation.rollout_engines
    engine.control.destroy_weights_update_group(group_name)
    start_s = time.monotonic()
    with pytest.raises(TransferError, match=rf"engine 0 at http.* failed at bucket 0 .*Group {group_name} not in"):
        stack.synchronizer.sync_weights()
    assert time.monotonic() - start_s < 20
    assert stack.synchronizer.is_stale
    assert stack.synchronizer.metrics()["refit/weight_version"] == version
    assert engine.control.weight_version() == str(version)
    blocked = threading.Event()
    url = engine.control.url
    thread = threading.Thread(target=lambda: (generate_at(stack, url, [5] * 8), blocked.set()), daemon=True)
    thread.start()
    assert not blocked.wait(2.0), "generation went on after a failed refit"
    with pytest.raises(TransferError, match="there is no weight-update group"):
        stack.policy.update_weights_to_sglang_distributed(
            rollout_engines=stack.generation.rollout_engines, buffer_size_bytes=2**20, target_precision="fp32"
        )
    assert list(stack.generation.failed_engines) == [engine.name]
    with pytest.raises(EnginesLostError, match=r"failed at bucket 0"):
        stack.synchronizer.sync_weights()
    assert stack.synchronizer.is_stale
    assert not blocked.is_set()
