"""What is refused before a group is made."""

import errno
import socket
from datetime import timedelta

import pytest
import torch
from gloo_engine import GlooEngine

from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.errors import TransferError
from nemo_rl.distributed.weight_transfer.preflight import check_ends, shared_environment
from nemo_rl.distributed.weight_transfer.process_group import open_store
from nemo_rl.distributed.weight_transfer.rollout_engines import connect_rollout_engines_from_distributed
from nemo_rl.models.generation.sglang.server_args import build_environment
from nemo_rl.models.policy.utils import init_process_group


def engine(value: str | None, name: str = "engine 0") -> GlooEngine:
    made = GlooEngine(name)
    made.nccl_cumem_enable = value
    return made


@pytest.mark.parametrize(
    ("own", "theirs"), [(None, None), ("0", "0"), ("1", "1"), (None, "-2"), ("-2", None), ("", None)]
)
def test_equal_ends_are_let_through(own: str | None, theirs: str | None) -> None:
    check_ends([engine(theirs)], "nccl", {} if own is None else {"NCCL_CUMEM_ENABLE": own})


@pytest.mark.parametrize(
    ("own", "theirs", "said"),
    [
        (None, "0", "NCCL_CUMEM_ENABLE: unset at the trainer, '0' at engine 1;"),
        ("1", "0", "NCCL_CUMEM_ENABLE: '1' at the trainer, '0' at engine 1;"),
        ("0", None, "NCCL_CUMEM_ENABLE: '0' at the trainer, unset at engine 1;"),
    ],
)
def test_a_difference_is_refused_with_both_values(own: str | None, theirs: str | None, said: str) -> None:
    environment = {} if own is None else {"NCCL_CUMEM_ENABLE": own}
    engines = [engine(own), engine(theirs, "engine 1")]
    with pytest.raises(TransferError) as caught:
        check_ends(engines, "nccl", environment)
    assert str(caught.value).startswith(said)
    check_ends(engines, "gloo", environment)


@pytest.mark.parametrize(("driver", "both"), [(None, "0"), ("", "0"), ("0", "0"), ("1", "1"), ("-2", "-2")])
def test_both_ends_have_what_the_driver_has(driver: str | None, both: str) -> None:
    own = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "HOME": "/h"}
    shared = shared_environment(own if driver is None else own | {"NCCL_CUMEM_ENABLE": driver})
    assert shared == {"NCCL_CUMEM_ENABLE": both, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    server = build_environment(shared, device="cuda", tp_size=1, cores=[0])
    check_ends([engine(server["NCCL_CUMEM_ENABLE"])], "nccl", shared)


def test_an_engine_argument_that_sets_another_value_is_refused_with_both() -> None:
    shared = shared_environment({})
    server = build_environment(shared, device="cuda", tp_size=1, cores=[0], extra_args=["--enable-symm-mem"])
    with pytest.raises(TransferError, match=r"^NCCL_CUMEM_ENABLE: '0' at the trainer, '1' at engine 0;"):
        check_ends([engine(server["NCCL_CUMEM_ENABLE"])], "nccl", shared)


def test_connect_refuses_before_any_engine_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")
    asked = GlooEngine("engine 0")
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME: got 'no_such_interface'"):
        connect_rollout_engines_from_distributed(
            rollout_engines=[asked],
            engine_gpu_counts=[1],
            group_name="refit",
            backend="gloo",
            master_address="127.0.0.1",
            deadline=Deadline(5),
        )
    assert asked.calls == []


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_an_interface_that_a_trainer_rank_lacks_is_told_before_gloo_fails_on_it(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "nosuch0")
    with pytest.raises(ValueError, match=rf"^{variable}: got 'nosuch0'; .* of this machine, which has"):
        init_process_group(
            device=torch.device("cpu"),
            rank=0,
            world_size=1,
            master_addr="127.0.0.1",
            master_port=0,
            timeout_s=5.0,
        )


def test_a_connection_from_the_port_at_another_address_does_not_keep_the_trainers_from_theirs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as other:
        port = other.getsockname()[1]
        store = open_store("127.0.0.2", timedelta(seconds=5), port=port, world_size=1)
        store.set("key", "value")
        assert (store.port, store.get("key")) == (port, b"value")
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.3", port)) == errno.ECONNREFUSED
