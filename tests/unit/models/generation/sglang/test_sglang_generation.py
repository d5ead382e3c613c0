"""Several engines through the driver's handle: real Ray actors, supervisors and router; only the model is missing."""

import logging
import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import little_worker
import psutil
import pytest
import ray
import torch
from sglang_config import make_config

from nemo_rl.config.layout import Layout
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, start_ray
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.models.generation.interfaces import EnginesFailedError, EnginesLostError, ReplacementsUsedUpError
from nemo_rl.models.generation.sglang.http_client import EngineError
from nemo_rl.models.generation.sglang.sglang_generation import SGLangGeneration

# Workers of Ray cannot import what only this test's folder has.
ray.cloudpickle.register_pickle_by_value(little_worker)
TOLERANT = {"use_fault_tolerance": True, "health_check_first_wait_s": 3600.0}
TIMEOUT_S = 60.0


@dataclass
class Tokenizer:
    pad_token_id: int = 0
    eos_token_id: int = 2


@pytest.fixture(scope="module")
def ray_cluster():
    start_ray(device="cpu", num_slots=3, num_nodes=1)
    yield
    ray.shutdown()


@contextmanager
def running(tmp_path, num_engines, *, tolerance=None, **settings):
    cluster = RayVirtualCluster(name="engines", slots=[1] * num_engines, device="cpu")
    config = make_config(tolerance=tolerance, server={"request_timeout_s": 60.0}, **settings)
    layout = Layout(num_nodes=1, num_train_slots=1, num_engines=num_engines, num_slots_per_engine=1)
    generation = SGLangGeneration(cfg=config, layout=layout, device="cpu", worker_class=little_worker.LittleWorker)
    try:
        generation.launch(cluster, model_folder=tmp_path, tokenizer=Tokenizer(), log_folder=tmp_path / "logs")
        generation.wait_ready()
        yield generation
    finally:
        generation.shutdown()
        ray.util.remove_placement_group(cluster._group)


def num_generated(generation):
    return [receiver.control.get("/model_info")["generated"] for receiver in generation.rollout_engines]


def server_pid(receiver):
    return receiver.control.get("/model_info")["pid"]


def kill_server(receiver):
    os.kill(server_pid(receiver), signal.SIGKILL)


def alive(processes):
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def prompts(num):
    return BatchedDataDict({"input_ids": torch.arange(10, 10 + num)[:, None], "input_lengths": torch.ones(num).long()})


def sampled(batch):
    """The echo of each prompt."""
    return batch["output_ids"][:, 1].tolist()


def listening_ports(pid):
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return {c.laddr for p in family for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def wait_until(condition):
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_one_engine_has_no_router(ray_cluster, tmp_path):
    with running(tmp_path, 1) as generation:
        assert sampled(generation.generate(prompts(5))) == list(range(10, 15))
        assert (generation.engine_gpu_counts, len(generation.rollout_engines)) == ([1], 1)
        assert not (tmp_path / "logs/sglang_router.log").exists()


def test_control_calls_reach_every_engine_and_name_the_one_that_fails(ray_cluster, tmp_path):
    with running(tmp_path, 2) as generation:
        first, second = generation.rollout_engines
        generation.set_weight_version(7, Deadline(TIMEOUT_S))
        assert generation.generate(prompts(16))["weight_version"] == ["7"] * 16
        assert all(count > 0 for count in num_generated(generation))
        kill_server(second)
        with pytest.raises(EnginesFailedError, match="engine 1 at http") as caught:
            generation.set_weight_version(8, Deadline(TIMEOUT_S))
        assert caught.value.names == (second.name,)
        assert first.control.weight_version() == "8"
        pid = server_pid(first)
        ray.kill(generation._fleet.ready()[0].actor)
        wait_until(lambda: not psutil.pid_exists(pid))
        with pytest.raises(EnginesFailedError) as caught:
            generation.set_weight_version(9, Deadline(TIMEOUT_S))
        assert caught.value.names == (first.name, second.name)
        assert "Connection refused" in caught.value.faults[first.name]


def test_an_engine_that_does_not_answer_a_control_call_is_named_at_the_deadline(ray_cluster, tmp_path):
    with running(tmp_path, 2) as generation:
        _, second = generation.rollout_engines
        os.kill(server_pid(second), signal.SIGSTOP)
        start_s = time.monotonic()
        with pytest.raises(EnginesFailedError) as caught:
            generation.set_weight_version(1, Deadline(2.0))
        assert time.monotonic() - start_s < 6
        assert caught.value.names == (second.name,)


def test_without_fault_tolerance_a_dead_engine_ends_the_rollout_with_its_name(ray_cluster, tmp_path):
    with running(tmp_path, 2) as generation:
        second = generation.rollout_engines[1]
        kill_server(second)
        with pytest.raises(EngineError, match="engine 1 at http.*HTTP 500") as caught:
            generation.generate(prompts(16))
        assert caught.value.engine == second.name
        assert not generation.replaces_failed_engines


def test_a_killed_engine_loses_no_prompt_and_is_replaced_under_a_new_name(ray_cluster, tmp_path, caplog):
    slow = {"generation": {"max_new_tokens": 200}, "max_total_sequence_length": 1000}
    with running(tmp_path, 2, tolerance=TOLERANT, **slow) as generation:
        generation.clear_updatable_num_new_engines()
        first, second = generation.rollout_engines
        pid = server_pid(first)
        with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING):
            pending = pool.submit(generation.generate, prompts(16))
            time.sleep(0.5)
            os.kill(pid, signal.SIGKILL)
            batch = pending.result(timeout=60)
        assert sampled(batch) == list(range(10, 26))
        assert num_generated(generation) == [16]
        assert generation.rollout_engines == [second]
        assert list(generation.failed_engines) == [first.name]
        assert "is taken for dead: nobody listens" in caplog.text
        assert generation.num_new_engines == 1
        (name,) = generation.replace_failed(Deadline(TIMEOUT_S))
        assert name.startswith("engine 2 at http")
        assert [receiver.name for receiver in generation.rollout_engines] == [second.name, name]
        assert generation.engine_gpu_counts == [1, 1]
        assert generation.num_new_engines == 2
        assert generation.failed_engines == {}
        assert generation.engines == {first.name: "ended", second.name: "ready", name: "ready"}
        # It has old weights until a refit has been through, and gets nothing to do.
        generation.generate(prompts(16))
        assert num_generated(generation) == [32, 0]
        generation.pause(Deadline(TIMEOUT_S))
        generation.clear_updatable_num_new_engines()
        generation.resume(Deadline(TIMEOUT_S))
        assert generation.num_new_engines == 0
        generation.generate(prompts(16))
        assert all(more > before for more, before in zip(num_generated(generation), [32, 0], strict=True))


def test_quarantined_engines_get_nothing_and_are_replaced(ray_cluster, tmp_path):
    with running(tmp_path, 2, tolerance={**TOLERANT, "max_replacements": 1}) as generation:
        first, second = generation.rollout_engines
        supervisor = ray.get(generation._fleet.ready()[0].actor.pid.remote())
        generation.pause(Deadline(TIMEOUT_S))
        generation.quarantine([first.name], "bucket 3 failed")
        assert generation.failed_engines == {first.name: "bucket 3 failed"}
        generation.resume(Deadline(TIMEOUT_S))
        assert sampled(generation.generate(prompts(8))) == list(range(10, 18))
        assert num_generated(generation) == [8]
        (name,) = generation.replace_failed(Deadline(TIMEOUT_S))
        assert not psutil.pid_exists(supervisor)
        assert generation.rollout_engines[1].name == name
        generation.quarantine([second.name, first.name])
        says = rf"max_replacements: 1, of which 1 are used; failed now: {second.name}: a refit failed"
        with pytest.raises(ReplacementsUsedUpError, match=says):
            generation.replace_failed(Deadline(TIMEOUT_S))
        assert generation.engines[second.name] == "quarantined"
        with pytest.raises(ValueError, match=r"engines: got engine 9; allowed: engine 0 at"):
            generation.quarantine(["engine 9"])


def test_the_last_engine_is_lost_and_the_rest_is_sampled_after_its_replacement(ray_cluster, tmp_path):
    server = {"tolerance": TOLERANT, "generation": {"max_new_tokens": 30}}
    with running(tmp_path, 1, **server) as generation:
        (first,) = generation.rollout_engines
        generation.set_weight_version(4, Deadline(TIMEOUT_S))
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(generation.generate, prompts(100))
            wait_until(lambda: num_generated(generation)[0] > 20)
            kill_server(first)
            with pytest.raises(EnginesLostError) as caught:
                pending.result(timeout=60)
        assert caught.value.names == (first.name,)
        with pytest.raises(EnginesLostError):
            generation.pause(Deadline(TIMEOUT_S))
        generation.replace_failed(Deadline(TIMEOUT_S))
        generation.set_weight_version(4, Deadline(TIMEOUT_S))
        generation.resume(Deadline(TIMEOUT_S))
        batch = generation.resume_generate()
        assert sampled(batch) == list(range(10, 110))
        assert batch["weight_version"] == ["4"] * 100
        assert 0 < num_generated(generation)[0] < 80


def test_engines_are_added_and_removed_between_refits(ray_cluster, tmp_path):
    with running(tmp_path, 1) as generation:
        (first,) = generation.rollout_engines
        with pytest.raises(ValueError, match="it is the only one that is ready"):
            generation.remove_engine(first.name, Deadline(TIMEOUT_S))
        name = generation.add_engine(Deadline(TIMEOUT_S))
        generation.resume(Deadline(TIMEOUT_S))
        generation.generate(prompts(16))
        counts = num_generated(generation)
        assert sum(counts) == 16
        assert all(counts)
        generation.clear_updatable_num_new_engines()
        supervisor = psutil.Process(ray.get(generation._fleet.ready()[0].actor.pid.remote()))
        family = [supervisor, *supervisor.children(recursive=True)]
        generation.remove_engine(first.name, Deadline(TIMEOUT_S))
        assert alive(family) == []
        assert generation.num_new_engines == 1
        assert [receiver.name for receiver in generation.rollout_engines] == [name]
        assert sampled(generation.generate(prompts(4))) == list(range(10, 14))
        again = generation.add_engine(Deadline(TIMEOUT_S))
        assert list(generation.engines.values()) == ["ended", "ready", "ready"]
        assert again.startswith("engine 2 at ")


def test_the_monitor_finds_an_engine_that_hangs_and_ends_it_so_that_its_samples_go_elsewhere(ray_cluster, tmp_path):
    quick = {
        "use_fault_tolerance": True,
        "health_check_first_wait_s": 0.0,
        "health_check_interval_s": 1.0,
        "health_check_timeout_s": 1.0,
        "health_check_max_failures": 2,
    }
    with running(tmp_path, 2, tolerance=quick) as generation:
        generation.resume(Deadline(TIMEOUT_S))
        first, _ = generation.rollout_engines
        os.kill(server_pid(first), signal.SIGSTOP)
        start_s = time.monotonic()
        assert sampled(generation.generate(prompts(16))) == list(range(10, 26))
        assert time.monotonic() - start_s < 15
        assert generation.failed_engines == {first.name: "no answer to a health check within 1 s"}
        # A paused engine answers no health check; none is made.
        generation.pause(Deadline(TIMEOUT_S))
        time.sleep(3.5)
        assert list(generation.failed_engines) == [first.name]
        generation.resume(Deadline(TIMEOUT_S))


def test_a_router_that_dies_is_started_again(ray_cluster, tmp_path):
    with running(tmp_path, 2, tolerance=TOLERANT) as generation:
        router = generation._fleet.dispatcher.router
        os.kill(psutil.Process(router._process.pid).children()[0].pid, signal.SIGKILL)
        wait_until(lambda: not router.is_alive())
        assert sampled(generation.generate(prompts(16))) == list(range(10, 26))
        assert router.is_alive()


def test_an_engine_that_does_not_start_is_named_with_the_end_of_its_log(ray_cluster, tmp_path):
    (tmp_path / "broken").touch()
    with (
        pytest.raises(EnginesFailedError, match=r"engine 0: .*(?s:.*)this engine does not start"),
        running(tmp_path, 1),
    ):
        pytest.fail("it started")


def test_nobody_gets_in_without_the_key(ray_cluster, tmp_path):
    with running(tmp_path, 2) as generation:
        router = generation._fleet.dispatcher.router
        keys = router._keys
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
        for url in (router.url, *(r.control.url for r in generation.rollout_engines)):
            assert httpx.post(f"{url}/generate", json=body).status_code == 401
            assert httpx.post(f"{url}/generate", json=body, headers=keys.headers(admin=True)).status_code == 401
            assert httpx.post(f"{url}/generate", json=body, headers=keys.headers(admin=False)).status_code == 200
        for headers in ({}, keys.headers(admin=False)):
            assert httpx.get(f"{router.url}/workers", headers=headers).status_code == 401
            assert httpx.post(f"{router.url}/workers", json={"url": router.url}, headers=headers).status_code == 401
        doors = ("/health", "/liveness", "/readiness", "/health_generate", "/get_server_info", "/v1/models")
        assert [httpx.get(router.url + door).status_code for door in doors] == [200] * len(doors)
        closed = ("/get_loads", "/v1/tokenizers", "/wasm", "/ha/status", "/ha/config", "/ha/workers")
        assert [httpx.get(router.url + door).status_code for door in closed] == [401] * len(closed)
        assert httpx.post(f"{router.url}/flush_cache").status_code == 401
        family = psutil.Process(router._process.pid)
        commands = [part for process in (family, *family.children(recursive=True)) for part in process.cmdline()]
        texts = [*commands, *((tmp_path / "logs" / f).read_text() for f in os.listdir(tmp_path / "logs"))]
        assert not [text for text in texts if keys.api_key in text or keys.admin_api_key in text]
        assert {address.ip for address in listening_ports(router._process.pid)} == {"127.0.0.1"}


def test_shutdown_leaves_nothing_and_may_be_called_twice(ray_cluster, tmp_path):
    with running(tmp_path, 2, tolerance=TOLERANT) as generation:
        kill_server(generation.rollout_engines[0])
        pids = [ray.get(engine.actor.pid.remote()) for engine in generation._fleet.ready()]
        pids.append(generation._fleet.dispatcher.router._process.pid)
        generation.shutdown()
        wait_until(lambda: not [pid for pid in pids if psutil.pid_exists(pid)])


@pytest.mark.parametrize(
    ("policy", "keeps_together"), [("manual", True), ("consistent_hashing", True), ("round_robin", False)]
)
def test_the_policy_decides_whether_samples_of_one_prompt_stay_together(ray_cluster, tmp_path, policy, keeps_together):
    groups = torch.arange(1, 17).repeat_interleave(8)
    # What prompts have in common does not send them to one engine.
    ids = torch.cat([torch.full((128, 20), 5), groups[:, None].expand(128, 10)], dim=1)
    data = BatchedDataDict({"input_ids": ids, "input_lengths": torch.full((128,), 30)})
    with running(tmp_path, 2, router={"policy": policy}) as generation:
        for receiver, name in zip(generation.rollout_engines, "ab", strict=True):
            receiver.control.update_weight_version(name)
        engines = generation.generate(data)["weight_version"]
        together = [len(set(engines[start : start + 8])) == 1 for start in range(0, 128, 8)]
        assert all(together) if keeps_together else not any(together)
        if policy != "consistent_hashing":
            assert 32 <= Counter(engines)["a"] <= 96
