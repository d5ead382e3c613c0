"""Two real SGLang servers behind the real router: what goes through, who dies, who comes back."""

import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
import torch
from engine_config import make_policy_config
from transformers import AutoTokenizer

from nemo_rl.config.layout import Layout
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, start_ray
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.models.generation.sglang.sglang_generation import SGLangGeneration

MAX_NEW_TOKENS = 400
LAYOUT = Layout(num_nodes=1, num_train_slots=1, num_engines=2, num_slots_per_engine=1)
TOLERANCE = {
    "use_fault_tolerance": True,
    "health_check_first_wait_s": 0.0,
    "health_check_interval_s": 2.0,
    "health_check_timeout_s": 10.0,
    "health_check_max_failures": 2,
}


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    start_ray(device="cpu", num_slots=3, num_nodes=1)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def log_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two_engines")


@pytest.fixture(scope="module")
def generation(ray_cluster: None, tiny_model_folder: Path, log_folder: Path) -> Iterator[SGLangGeneration]:
    """Two engines that serve. A test but the last leaves two that serve the first weights, whichever they are."""
    config = make_policy_config(
        tiny_model_folder,
        server={"sglang_server_concurrency": 32},
        tolerance=TOLERANCE,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    cluster = RayVirtualCluster(name="engines", slots=[1] * 2, device="cpu")
    generation = SGLangGeneration(cfg=config, layout=LAYOUT, device="cpu")
    try:
        generation.launch(
            cluster,
            model_folder=tiny_model_folder,
            tokenizer=AutoTokenizer.from_pretrained(tiny_model_folder),
            log_folder=log_folder,
        )
        generation.wait_ready()
        generation.clear_updatable_num_new_engines()
        generation.resume(deadline())
        yield generation
    finally:
        generation.shutdown()


def deadline() -> Deadline:
    return Deadline(240.0)


def prompts(num: int, *, length: int = 24, seed: int = 0) -> BatchedDataDict:
    ids = torch.randint(4, 100, (num, length), generator=torch.Generator().manual_seed(seed))
    return BatchedDataDict({"input_ids": ids, "input_lengths": torch.full((num,), length)})


def ask(generation: SGLangGeneration, address: str, prompt: torch.Tensor) -> dict[str, Any]:
    body = {
        "input_ids": prompt.tolist(),
        "sampling_params": {"max_new_tokens": 24, "temperature": 0.0, "top_k": -1, "top_p": 1.0, "stop": []},
        "return_logprob": True,
    }
    response = httpx.post(f"{address}/generate", json=body, headers=generation.keys.headers(admin=False), timeout=120)
    assert response.status_code == 200
    return response.json()["meta_info"]


def server_of(generation: SGLangGeneration, name: str) -> psutil.Process:
    (actor,) = [engine.actor for engine in generation._fleet.ready() if engine.name == name]
    (server,) = psutil.Process(ray.get(actor.pid.remote())).children()
    return server


def stop_schedulers(generation: SGLangGeneration, name: str) -> None:
    schedulers = [
        p for p in server_of(generation, name).children(recursive=True) if "scheduler" in " ".join(p.cmdline())
    ]
    assert schedulers
    for process in schedulers:
        process.suspend()


def label(generation: SGLangGeneration) -> None:
    """Let each engine report a version of its own: a sample then tells who made it."""
    for index, receiver in enumerate(generation.rollout_engines):
        receiver.control.update_weight_version(f"of {index}")


def test_answers_through_the_router_equal_direct_ones(generation: SGLangGeneration) -> None:
    router = generation._fleet.dispatcher.router
    assert router is not None
    generation.set_weight_version(5, deadline())
    for prompt in prompts(6)["input_ids"]:
        answers = [
            ask(generation, address, prompt)
            for address in (router.url, *(receiver.control.url for receiver in generation.rollout_engines))
        ]
        tokens = [[entry[1] for entry in answer["output_token_logprobs"]] for answer in answers]
        logprobs = torch.tensor([[entry[0] for entry in answer["output_token_logprobs"]] for answer in answers])
        assert tokens[0] == tokens[1] == tokens[2]
        assert (logprobs - logprobs[0]).abs().max() < 1e-4
        assert [answer["weight_version"] for answer in answers] == ["5"] * 3
        assert answers[0]["finish_reason"]["type"] == answers[1]["finish_reason"]["type"]


def test_many_requests_spread_over_both_and_keep_their_order(generation: SGLangGeneration) -> None:
    label(generation)
    data = prompts(32).repeat_interleave(8)
    batch = generation.generate(data, greedy=True)
    assert batch["output_ids"][:, :24].equal(data["input_ids"])
    makers = batch["weight_version"]
    assert set(makers) == {"of 0", "of 1"}
    assert min(Counter(makers).values()) > 64
    assert all(len(set(makers[start : start + 8])) == 1 for start in range(0, 256, 8))
    short = [row[24:40].tolist() for row in batch["output_ids"]]
    assert all(short[row] == short[row - row % 8] for row in range(256))


def test_checksums_of_both_are_equal_and_control_calls_reach_both(generation: SGLangGeneration) -> None:
    first, second = generation.weight_checksums(deadline())
    assert first == second
    assert len(first) > 10
    generation.pause(deadline())
    generation.begin_weight_update(deadline())
    generation.end_weight_update(deadline())
    generation.set_weight_version(9, deadline())
    # Longer than the monitor takes to find a paused engine dead, were it to ask.
    time.sleep(7)
    generation.resume(deadline())
    assert generation.failed_engines == {}
    assert set(generation.generate(prompts(8))["weight_version"]) == {"9"}


def test_the_router_gives_nothing_away(generation: SGLangGeneration, log_folder: Path) -> None:
    router = generation._fleet.dispatcher.router
    assert router is not None
    keys = {generation.keys.api_key, generation.keys.admin_api_key}
    generate = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
    assert httpx.post(f"{router.url}/generate", json=generate).status_code == 401
    for endpoint in ("server_info", "get_server_info", "model_info", "v1/models", "engine_metrics", "workers"):
        for headers in ({}, generation.keys.headers(admin=False)):
            text = httpx.get(f"{router.url}/{endpoint}", headers=headers, timeout=60).text
            assert not [key for key in keys if key in text]
    log = (log_folder / "sglang_router.log").read_text()
    assert not [key for key in keys if key in log]


def test_killing_one_of_two_loses_no_sample_and_it_is_replaced(
    generation: SGLangGeneration, caplog: pytest.LogCaptureFixture
) -> None:
    data = prompts(16, seed=1)
    undisturbed = generation.generate(data, greedy=True)
    label(generation)
    first, second = generation.rollout_engines
    # Whatever it is sent is then unfinished when it dies, however fast the machine.
    stop_schedulers(generation, first.name)
    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING):
        pending = pool.submit(generation.generate, data, greedy=True)
        time.sleep(1.0)
        assert not pending.done()
        os.kill(server_of(generation, first.name).pid, signal.SIGKILL)
        batch = pending.result(timeout=120)
    assert "is sent again" in caplog.text
    assert batch["output_ids"].equal(undisturbed["output_ids"])
    assert batch["generation_lengths"].equal(undisturbed["generation_lengths"])
    assert (batch["logprobs"] - undisturbed["logprobs"]).abs().max() < 1e-3
    assert set(batch["weight_version"]) == {"of 1"}
    assert list(generation.failed_engines) == [first.name]
    (name,) = generation.replace_failed(deadline())
    assert [receiver.name for receiver in generation.rollout_engines] == [second.name, name]
    assert generation.num_new_engines == 2
    digests = generation.weight_checksums(deadline())
    assert digests[0] == digests[1]
    generation.clear_updatable_num_new_engines()
    generation.resume(deadline())
    label(generation)
    assert set(generation.generate(prompts(32))["weight_version"]) == {"of 0", "of 1"}


def test_an_engine_can_be_removed_and_another_added(generation: SGLangGeneration) -> None:
    first, second = generation.rollout_engines
    server = server_of(generation, first.name)
    family = [server, *server.children(recursive=True)]
    generation.remove_engine(first.name, deadline())
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert generation.generate(prompts(4)).size == 4
    assert [receiver.name for receiver in generation.rollout_engines] == [second.name]
    name = generation.add_engine(deadline())
    generation.resume(deadline())
    label(generation)
    assert [receiver.name for receiver in generation.rollout_engines] == [second.name, name]
    assert set(generation.generate(prompts(32))["weight_version"]) == {"of 0", "of 1"}


def test_an_engine_whose_scheduler_hangs_is_found_and_its_samples_come_from_the_other(
    generation: SGLangGeneration,
) -> None:
    """The last one: its engine is not replaced."""
    _, second = generation.rollout_engines
    stop_schedulers(generation, second.name)
    batch = generation.generate(prompts(16), greedy=True)
    assert batch.size == 16
    assert list(generation.failed_engines) == [second.name]
    assert "health check" in generation.failed_engines[second.name]
