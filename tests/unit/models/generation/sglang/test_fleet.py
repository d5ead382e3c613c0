"""Where servers listen, and how long the end of a run may take."""

import pytest
import ray

from nemo_rl.config.layout import Layout
from nemo_rl.models.generation.sglang import engine_pool, server_supervisor
from nemo_rl.models.generation.sglang.fleet import shared_host
from nemo_rl.models.generation.sglang.server_process import PortTakenError, ServerStartError
from nemo_rl.run import RUN_FAILURES

CLEAN_UP_S = 20.0


@pytest.mark.parametrize(
    ("num_nodes", "alive", "host"),
    [(1, [True], "127.0.0.1"), (1, [True, False], "127.0.0.1"), (1, [True, True], None), (2, [True, True], None)],
)
def test_servers_listen_on_loopback_only_where_nobody_can_be_elsewhere(monkeypatch, num_nodes, alive, host):
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": is_alive} for is_alive in alive])
    layout = Layout(num_nodes=num_nodes, num_train_slots=1, num_engines=2, num_slots_per_engine=1)
    assert shared_host(layout) == host


def test_an_actor_that_does_not_listen_is_killed_early_enough_for_its_server_to_end_in_time():
    supervisor_s = (
        server_supervisor.POLL_INTERVAL_S
        + server_supervisor.TERMINATE_TIMEOUT_S
        + server_supervisor.TRACKER_TIMEOUT_S
        + server_supervisor.OUTPUT_TIMEOUT_S
    )
    assert engine_pool._SHUTDOWN_TIMEOUT_S + supervisor_s < CLEAN_UP_S


@pytest.mark.parametrize("error", [ServerStartError, PortTakenError])
def test_a_router_that_does_not_start_ends_the_run_with_its_log_and_no_traceback(error):
    assert issubclass(error, RUN_FAILURES)
