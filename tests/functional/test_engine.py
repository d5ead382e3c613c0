"""The real SGLang server, through the worker and the driver's handle."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from engine_config import CONCURRENCY, HOST, MAX_TOTAL_SEQUENCE_LENGTH, OneEngine, make_policy_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.weight_transfer.buckets import BucketHeader
from nemo_rl.models.generation.sglang.access import AccessKeys
from nemo_rl.models.generation.sglang.http_client import EngineClient, EngineError, ServerCapabilities
from nemo_rl.models.generation.sglang.sampler import EngineSampler
from nemo_rl.models.generation.sglang.server_process import ServerStartError
from nemo_rl.models.generation.sglang.sglang_worker import SGLangGenerationWorker

TEXTS = ["3 + 4 =", "a", "The quick brown fox jumps over the lazy dog. " * 3, "x <y> & \n z"]


@pytest.fixture(scope="module")
def reference(tiny_model_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(tiny_model_folder):
    return AutoTokenizer.from_pretrained(tiny_model_folder)


@pytest.fixture
def prompts(tokenizer):
    batch = tokenizer(TEXTS, padding=True, padding_side="right", return_tensors="pt", add_special_tokens=False)
    return BatchedDataDict({"input_ids": batch["input_ids"], "input_lengths": batch["attention_mask"].sum(1)})


def _expected_logprobs(reference, output_ids, temperature):
    """log p of each token given those before it, `[batch, seq]`; position 0 is 0."""
    with torch.no_grad():
        logits = reference(output_ids).logits[:, :-1] / temperature
    chosen = logits.log_softmax(-1).gather(-1, output_ids[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(chosen, (1, 0))


def _response_mask(batch, prompts):
    positions = torch.arange(batch["output_ids"].shape[1])
    return (positions >= prompts["input_lengths"][:, None]) & (positions < batch["unpadded_sequence_lengths"][:, None])


def test_greedy_tokens_and_logprobs_equal_transformers(make_generation, prompts, reference):
    batch = make_generation().generate(prompts, greedy=True)
    for row, length in enumerate(prompts["input_lengths"].tolist()):
        ids = prompts["input_ids"][row : row + 1, :length]
        with torch.no_grad():
            expected = reference.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=2, pad_token_id=0)[0]
        end = int(batch["unpadded_sequence_lengths"][row])
        assert batch["output_ids"][row, :end].tolist() == expected.tolist()
        assert (batch["output_ids"][row, end:] == 0).all()
    mask = _response_mask(batch, prompts)
    expected = _expected_logprobs(reference, batch["output_ids"], 1.0)
    assert (batch["logprobs"] - expected)[mask].abs().max() < 1e-3
    assert (batch["logprobs"][~mask] == 0).all()
    assert batch["generation_lengths"].tolist() == mask.sum(1).tolist()


@pytest.mark.parametrize(
    "settings", [{"temperature": 1.0}, {"temperature": 0.7}, {"temperature": 1.3, "top_p": 0.9}, {"top_k": 5}]
)
def test_logprobs_are_those_of_the_sampling_temperature(make_generation, prompts, reference, settings):
    data = prompts.repeat_interleave(4)
    batch = make_generation(**settings).generate(data)
    expected = _expected_logprobs(reference, batch["output_ids"], settings.get("temperature", 1.0))
    mask = _response_mask(batch, data)
    assert mask.sum() > 100
    assert (batch["logprobs"] - expected)[mask].abs().max() < 1e-3


def test_samples_of_one_prompt_differ(make_generation, prompts):
    batch = make_generation().generate(prompts.select_indices([0] * 8))
    assert len({tuple(row) for row in batch["output_ids"].tolist()}) == 8


def _longest_answer(make_generation, prompts):
    """Row, token ids of the prompt's greedy answer; long enough to be cut."""
    free = make_generation().generate(prompts, greedy=True)
    row = int(free["generation_lengths"].argmax())
    start, end = int(prompts["input_lengths"][row]), int(free["unpadded_sequence_lengths"][row])
    assert end - start >= 8
    return row, free["output_ids"][row, start:end].tolist()


def test_stop_strings_end_each_sample_on_its_own_and_stay_in_the_tokens(make_generation, prompts, tokenizer):
    row, answer = _longest_answer(make_generation, prompts)
    text = tokenizer.decode(answer)
    stop = text[4:6]
    data = prompts.select_indices([row, row])
    data["stop_strings"] = [[stop], None]
    stopped = make_generation().generate(data, greedy=True)
    length = next(n for n in range(1, len(answer)) if stop in tokenizer.decode(answer[:n]))
    assert stopped["generation_lengths"].tolist() == [length, len(answer)]
    start = int(prompts["input_lengths"][row])
    assert stopped["output_ids"][0, start : start + length].tolist() == answer[:length]
    assert stopped["truncated"].tolist()[0] is False


def test_stop_token_is_kept_with_its_logprob_and_is_not_a_truncation(make_generation, prompts):
    row, answer = _longest_answer(make_generation, prompts)
    stop_id = answer[3]
    stopped = make_generation(stop_token_ids=[stop_id]).generate(prompts.select_indices([row]), greedy=True)
    end = int(stopped["unpadded_sequence_lengths"][0])
    assert stopped["generation_lengths"].tolist() == [answer.index(stop_id) + 1]
    assert stopped["output_ids"][0, end - 1] == stop_id
    assert stopped["logprobs"][0, end - 1] < 0
    assert stopped["truncated"].tolist() == [False]


def test_length_truncates_and_the_total_length_is_respected(make_generation):
    long = MAX_TOTAL_SEQUENCE_LENGTH - 5
    lengths = torch.tensor([long, 4] * 8)
    data = BatchedDataDict({"input_ids": torch.full((16, long), 40), "input_lengths": lengths})
    batch = make_generation(max_new_tokens=9).generate(data)
    ended = batch["output_ids"][torch.arange(16), batch["unpadded_sequence_lengths"] - 1] == 2
    assert batch["truncated"].tolist() == (~ended).tolist()
    limits = torch.tensor([5, 9] * 8)
    assert (batch["generation_lengths"] <= limits).all()
    assert (batch["generation_lengths"] == limits)[batch["truncated"]].all()
    assert batch["truncated"].reshape(8, 2).any(0).all()


def test_more_requests_than_the_engine_takes_at_once(make_generation, prompts):
    data = prompts.repeat_interleave(CONCURRENCY)
    batch = make_generation(max_new_tokens=4).generate(data)
    assert batch.size == 4 * CONCURRENCY
    assert (batch["generation_lengths"] >= 1).all()
    starts = prompts["input_lengths"].repeat_interleave(CONCURRENCY)
    for row, start in enumerate(starts.tolist()):
        assert batch["output_ids"][row, :start].tolist() == data["input_ids"][row, :start].tolist()


def test_capabilities_of_the_installed_server(shared_engine):
    assert shared_engine.capabilities == ServerCapabilities(
        weight_update_session=True,
        flattened_bucket=True,
        weights_checker=True,
        weight_version=True,
        pause_modes=True,
    )


def test_sessions_begin_and_end_once(shared_engine):
    shared_engine.begin_weight_update()
    with pytest.raises(EngineError, match="already open"):
        shared_engine.begin_weight_update()
    shared_engine.end_weight_update()
    with pytest.raises(EngineError, match="no weight-update session is open"):
        shared_engine.end_weight_update()


def test_a_refused_update_raises_with_the_engines_text(shared_engine):
    shared_engine.begin_weight_update()
    header = BucketHeader(0, ("lm_head.weight",), ("float32",), ((1, 1),), flattened=False)
    with pytest.raises(EngineError, match="nobody") as caught:
        shared_engine.update_weights_from_distributed(header, "nobody")
    shared_engine.end_weight_update()
    assert caught.value.endpoint == "/update_weights_from_distributed"
    assert "engine 0" in caught.value.engine
    with pytest.raises(EngineError, match="does not exist"):
        shared_engine.destroy_weights_update_group("nobody")


def test_disk_round_trip_moves_the_checksums_and_brings_them_back(shared_engine, tiny_model_folder, tmp_path):
    before = shared_engine.checksums()
    assert "0/model.embed_tokens.weight" in before
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1.5)
    model.save_pretrained(tmp_path)
    shared_engine.update_weights_from_disk(str(tmp_path))
    changed = shared_engine.checksums()
    shared_engine.update_weights_from_disk(str(tiny_model_folder))
    assert {name for name in before if before[name] != changed[name]} == {"0/model.layers.1.mlp.down_proj.weight"}
    assert shared_engine.checksums() == before


def test_samples_report_the_weight_version(shared_engine, make_generation, prompts):
    old = shared_engine.weight_version()
    shared_engine.update_weight_version("17")
    try:
        assert make_generation(max_new_tokens=2).generate(prompts)["weight_version"] == ["17"] * 4
    finally:
        shared_engine.update_weight_version(old)


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_every_request_has_a_defined_result_when_generation_is_paused(shared_engine, make_generation, tokenizer, mode):
    """More requests than run at once: some run, some wait in the engine, some wait in the driver."""
    num_requests, max_new_tokens = 10 * CONCURRENCY, 400
    ids = torch.tensor([tokenizer.encode(f"request {i:02d}", add_special_tokens=False) for i in range(num_requests)])
    data = BatchedDataDict({"input_ids": ids, "input_lengths": torch.full((num_requests,), ids.shape[1])})
    generation = make_generation(max_new_tokens=max_new_tokens, server={"sglang_server_concurrency": CONCURRENCY + 4})
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(generation.generate, data)
        time.sleep(0.5)
        shared_engine.pause_generation(mode)
        try:
            shared_engine.invalidate_kv_cache()
        finally:
            shared_engine.continue_generation()
        batch = pending.result(timeout=120)
    lengths = batch["generation_lengths"]
    full = (lengths == max_new_tokens) & batch["truncated"]
    ended = batch["output_ids"][torch.arange(num_requests), batch["unpadded_sequence_lengths"] - 1] == 2
    if mode == "retract":
        assert (full | ended).all()
    else:
        aborted = ~full & ~ended
        assert aborted.any()
        assert batch["truncated"][aborted].all()


def _sampler(config, url, keys):
    return EngineSampler(cfg=config, dispatcher=OneEngine(url), keys=keys, pad_token_id=0, eos_token_ids=[2])


def test_a_prompt_that_the_engine_refuses_names_the_engine(shared_engine, tiny_model_folder, engine_keys):
    config = make_policy_config(tiny_model_folder).model_copy(update={"max_total_sequence_length": 10_000})
    generation = _sampler(config, shared_engine.url, engine_keys)
    data = BatchedDataDict({"input_ids": torch.full((1, 9_000), 40), "input_lengths": torch.tensor([9_000])})
    with pytest.raises(EngineError, match=r"engine 0 at http.* /generate: HTTP 400: .*9000"):
        generation.generate(data)


def test_a_bad_model_folder_fails_early_with_the_end_of_the_log(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{not json")
    worker = _worker(tmp_path / "model", tmp_path)
    start_s = time.monotonic()
    with pytest.raises(ServerStartError, match=r"ended with status [1-9].*(?s:.*)config.json"):
        worker.start()
    assert time.monotonic() - start_s < 120
    worker.shutdown()


def _worker(model_folder: Path, log_dir: Path, **server) -> SGLangGenerationWorker:
    return SGLangGenerationWorker(
        cfg=make_policy_config(model_folder, server=server),
        engine_index=1,
        model_folder=str(model_folder),
        tokenizer_folder=None,
        device="cpu",
        log_dir=str(log_dir),
        host=HOST,
        keys=AccessKeys.make(),
    )


_OWNER_SCRIPT = """
import sys, time
from nemo_rl.config.schema import PolicyConfig
from nemo_rl.models.generation.sglang.access import AccessKeys
from nemo_rl.models.generation.sglang.sglang_worker import SGLangGenerationWorker

worker = SGLangGenerationWorker(
    cfg=PolicyConfig.model_validate_json(sys.argv[1]), engine_index=1, model_folder=sys.argv[2],
    tokenizer_folder=None, device="cpu", log_dir=sys.argv[3], host=sys.argv[4], keys=AccessKeys(*sys.stdin.read().split()),
)
sys.stdout.write(f"{worker.start()} {worker.pid()}\\n")
sys.stdout.flush()
time.sleep(600)
"""


def _start_owner(config, model_folder, log_folder, host, keys, temporary_folder):
    """A process that owns a server; nothing of the keys is on its command line or in its environment."""
    arguments = [config.model_dump_json(by_alias=True), str(model_folder), str(log_folder), host]
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER_SCRIPT, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(temporary_folder)},
        text=True,
    )
    assert owner.stdin is not None
    with owner.stdin:
        owner.stdin.write(f"{keys.api_key} {keys.admin_api_key}")
    return owner


def _key_files(folder):
    return list(folder.glob("**/keys.yaml"))


def _ports(connections):
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def test_engine_death_fails_generate_and_nothing_outlives_a_killed_owner(tiny_model_folder, tmp_path, prompts):
    """One more server, over IPv6, owned by a process of its own that is killed in the middle of a batch."""
    config = make_policy_config(tiny_model_folder, max_new_tokens=400)
    keys = AccessKeys.make()
    owner = _start_owner(config, tiny_model_folder, tmp_path, "::1", keys, tmp_path)
    assert owner.stdout is not None
    try:
        url, supervisor_pid = owner.stdout.readline().split()
        assert url.startswith("http://[::1]:")
        assert _key_files(tmp_path) == []
        supervisor = psutil.Process(int(supervisor_pid))
        family = [supervisor, *supervisor.children(recursive=True)]
        assert len(family) >= 4
        ports = {port for process in family for port in _ports(process.net_connections("tcp"))}
        assert int(url.rpartition(":")[2]) in ports
        generation = _sampler(config, url, keys)
        killer = threading.Timer(0.5, os.kill, (owner.pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(EngineError, match=rf"engine 0 at {re.escape(url)} /generate: no answer"):
            generation.generate(prompts.repeat_interleave(100))
        _, alive = psutil.wait_procs(family, timeout=20)
        assert alive == []
        assert not ports & _ports(psutil.net_connections("tcp"))
        with pytest.raises(EngineError, match="ConnectError"):
            EngineClient("engine", url, 5.0, keys).get("/health")
    finally:
        owner.kill()
        owner.wait()


def test_an_owner_killed_while_the_server_starts_leaves_nothing(tiny_model_folder, tmp_path):
    """The scheduler exists and still imports: it has not yet asked the kernel to die with its parent."""
    config = make_policy_config(tiny_model_folder)
    owner = _start_owner(config, tiny_model_folder, tmp_path, HOST, AccessKeys.make(), tmp_path)
    try:
        family = _wait_for_descendants(owner.pid, at_least=4, timeout_s=90.0)
    finally:
        owner.kill()
        owner.wait()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    assert _key_files(tmp_path) == []


def _wait_for_descendants(pid: int, *, at_least: int, timeout_s: float) -> list[psutil.Process]:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        family = psutil.Process(pid).children(recursive=True)
        if len(family) >= at_least:
            return family
        time.sleep(0.1)
    raise AssertionError(f"process {pid} has {len(family)} descendants after {timeout_s:g} s, expected {at_least}")
