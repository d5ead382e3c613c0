import dataclasses
import sys

import pytest
from sglang_config import make_config

from nemo_rl.models.generation.sglang.server_args import ServerPlace, build_command, build_environment


def _place(device="cpu", tokenizer_folder=None):
    return ServerPlace(
        model_folder="/models/m",
        tokenizer_folder=tokenizer_folder,
        device=device,
        host="127.0.0.1",
        port=1234,
        internal_port=1235,
        engine_index=3,
    )


def test_command_on_cpu():
    config = make_config(server={"sglang_server_concurrency": 4, "random_seed": 10, "num_gpus_per_engine": 2})
    command = build_command(config, _place())
    assert command[:4] == [sys.executable, "-m", "sglang.launch_server", "--model-path=/models/m"]
    for argument in (
        "--host=127.0.0.1",
        "--port=1234",
        "--nccl-port=1235",
        "--dtype=float32",
        "--tp-size=2",
        "--random-seed=13",
        "--max-running-requests=4",
        "--device=cpu",
        "--attention-backend=torch_native",
        f"--max-total-tokens={5 * 64}",
    ):
        assert command.count(argument) == 1
    assert not any(argument.startswith("--tokenizer-path") for argument in command)
    assert "--disable-radix-cache" not in command


def test_command_on_cuda_has_no_cpu_flag_and_ends_with_the_users_arguments():
    extra = ["--mem-fraction-static=0.5", "--log-level=debug"]
    command = build_command(make_config(server={"extra_args": extra}), _place("cuda", tokenizer_folder="/models/t"))
    assert command[-2:] == extra
    assert "--tokenizer-path=/models/t" in command
    assert not [a for a in command if a.startswith(("--device", "--attention-backend", "--max-total-tokens"))]


def test_an_engine_that_shares_its_gpu_takes_a_part_of_it_and_is_another_host_to_nccl():
    extra = ["--mem-fraction-static=0.2"]
    place = dataclasses.replace(_place("cuda"), shares_gpu=True)
    command = build_command(make_config(server={"extra_args": extra}), place)
    assert command[-2:] == ["--mem-fraction-static=0.4", *extra]
    environment = build_environment({}, device="cuda", tp_size=1, cores=[0], meets_rank0=True)
    assert environment["NCCL_HOSTID"].startswith("engines of ")
    assert "NCCL_HOSTID" not in build_environment({}, device="cuda", tp_size=1, cores=[0])


def test_environment_on_cpu():
    base = {"PATH": "/bin", "PYTHONDONTWRITEBYTECODE": "1", "SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}
    base |= {"SGLANG_MM_AVOID_RETOKENIZE": "0", "SGLANG_VLM_CACHE_SIZE_MB": "100"}
    environment = build_environment(base, device="cpu", tp_size=1, cores=[0, 1, 2, 3])
    assert environment["PATH"] == "/bin"
    assert environment["OMP_NUM_THREADS"] == "4"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert not {"PYTHONDONTWRITEBYTECODE", "SGLANG_RETURN_ORIGINAL_LOGPROB"} & set(environment)
    assert "SGLANG_MM_AVOID_RETOKENIZE" not in environment
    assert environment["SGLANG_VLM_CACHE_SIZE_MB"] == "0"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in environment
    assert base["PYTHONDONTWRITEBYTECODE"] == "1"


@pytest.mark.parametrize(
    ("cores", "tp_size", "bind", "num_threads"),
    [([0, 1], 2, "0|1", "1"), ([4, 5, 6, 7], 2, "4,5|6,7", "2"), ([0, 1], 3, "0|1|0", "1"), ([9], 2, "9|9", "1")],
)
def test_cores_are_shared_out_among_the_ranks(cores, tp_size, bind, num_threads):
    environment = build_environment({}, device="cpu", tp_size=tp_size, cores=cores)
    assert environment["SGLANG_CPU_OMP_THREADS_BIND"] == bind
    assert environment["OMP_NUM_THREADS"] == num_threads


def test_environment_on_cuda_leaves_devices_and_threads():
    base = {"CUDA_VISIBLE_DEVICES": "4,5", "OMP_NUM_THREADS": "3"}
    environment = build_environment(base, device="cuda", tp_size=2, cores=[0, 1])
    assert environment == {
        **base, "HF_HUB_OFFLINE": "1", "NCCL_CUMEM_ENABLE": "0", "SGLANG_VLM_CACHE_SIZE_MB": "0",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("base", "extra_args", "value"),
    [
        ({}, [], "0"),
        ({"NCCL_CUMEM_ENABLE": "1"}, [], "1"),
        ({"NCCL_CUMEM_ENABLE": "0"}, ["--mem-fraction-static=0.5", "--enable-symm-mem"], "1"),
    ],
)
def test_nccl_cumem_is_what_sglang_will_make_of_it(base, extra_args, value):
    environment = build_environment(base, device="cuda", tp_size=1, cores=[0], extra_args=extra_args)
    assert environment["NCCL_CUMEM_ENABLE"] == value


@pytest.mark.parametrize(
    ("base", "interface", "value"),
    [({}, "lo", "lo"), ({"GLOO_SOCKET_IFNAME": "eth1"}, "lo", "eth1"), ({}, None, None)],
)
def test_gloo_listens_on_the_servers_own_interface_unless_told_otherwise(base, interface, value):
    environment = build_environment(base, device="cpu", tp_size=1, cores=[0], interface=interface)
    assert environment.get("GLOO_SOCKET_IFNAME") == value


def test_front_ends_that_ask_for_no_key_are_not_switched_on_from_outside():
    base = {"SGLANG_RUST_SERVER": "1", "SGLANG_GRPC_PORT": "5"}
    assert not base.keys() & build_environment(base, device="cuda", tp_size=1, cores=[0]).keys()
