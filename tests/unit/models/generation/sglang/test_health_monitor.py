"""The monitor against servers that answer like engines."""

import asyncio
import errno
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
from fake_server import FakeEngineServer

from nemo_rl.config.schema import SGLangFaultToleranceConfig
from nemo_rl.models.generation.sglang import health_monitor
from nemo_rl.models.generation.sglang.health_monitor import Health, HealthMonitor, check_engines

HEALTHY = {"/health_generate": (200, {})}
SICK = {"/health_generate": (503, {})}
CONFIG = SGLangFaultToleranceConfig(
    use_fault_tolerance=True,
    health_check_interval_s=1.0,
    health_check_timeout_s=1.0,
    health_check_first_wait_s=0.0,
    health_check_max_failures=2,
)


@contextmanager
def monitoring(engines, config=CONFIG):
    """`engines`: name -> server; a dead one is not asked again."""
    dead = []

    def take_out(name, fault):
        dead.append((name, fault))
        del engines[name]

    monitor = HealthMonitor(config, lambda: {name: server.url for name, server in engines.items()}, take_out)
    monitor.start()
    try:
        yield monitor, dead
    finally:
        monitor.stop()


def wait_until(condition):
    end_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_every_engine_is_asked_at_once_and_each_fault_has_its_text():
    with FakeEngineServer() as gone:
        pass
    with (
        FakeEngineServer(HEALTHY, delay_s=0.5) as healthy,
        FakeEngineServer(SICK, delay_s=0.5) as sick,
        FakeEngineServer(HEALTHY, delay_s=3.0) as slow,
    ):
        urls = {"healthy": healthy.url, "sick": sick.url, "slow": slow.url, "gone": gone.url}
        start_s = time.monotonic()
        found = asyncio.run(check_engines(urls, "/health_generate", {"Authorization": "Bearer x"}, 1.0))
        assert time.monotonic() - start_s < 2.0
        assert sick.authorizations == ["Bearer x"]
    assert found["healthy"] == Health()
    assert found["sick"] == Health("HTTP 503 to a health check")
    assert found["slow"] == Health("no answer to a health check within 1 s")
    assert found["gone"].is_gone
    assert found["gone"].fault.startswith("nobody listens: ")


def test_an_engine_is_dead_after_so_many_failures_in_a_row_and_is_told_once():
    with (
        FakeEngineServer(HEALTHY) as good,
        FakeEngineServer(SICK) as sick,
        monitoring({"good": good, "sick": sick}) as (monitor, dead),
    ):
        monitor.resume()
        wait_until(lambda: dead)
        wait_until(lambda: len(good.requests) >= 4)
    assert dead == [("sick", "HTTP 503 to a health check")]
    assert len(sick.requests) == 2


class Scripted(FakeEngineServer):
    """Answers the first requests with these statuses, in their order."""

    def __init__(self, statuses):
        super().__init__()
        self.statuses = statuses

    def answer(self, path, body, authorization):
        super().answer(path, body, authorization)
        return self.statuses[len(self.requests) - 1], {}


def test_a_good_answer_starts_the_count_anew():
    config = CONFIG.model_copy(update={"health_check_max_failures": 3})
    statuses = [503, 503, 200, 503, 503, 503]
    with Scripted(statuses) as engine, monitoring({"engine": engine}, config) as (monitor, dead):
        monitor.resume()
        wait_until(lambda: dead)
        assert len(engine.requests) == 6


def test_where_nobody_listens_the_first_check_suffices():
    with FakeEngineServer() as gone:
        pass
    with monitoring({"gone": gone}) as (monitor, dead):
        monitor.resume()
        wait_until(lambda: dead)
    assert dead[0][0] == "gone"


def test_none_is_asked_before_resume_nor_after_suspend_which_waits_for_a_check_under_way():
    with FakeEngineServer(HEALTHY, delay_s=0.6) as engine, monitoring({"engine": engine}) as (monitor, dead):
        time.sleep(1.5)
        assert engine.requests == []
        monitor.resume()
        wait_until(lambda: engine.num_in_flight)
        monitor.suspend()
        assert (engine.num_in_flight, len(engine.requests)) == (0, 1)
        time.sleep(2.5)
        assert len(engine.requests) == 1
        monitor.resume()
        wait_until(lambda: len(engine.requests) == 2)
    assert dead == []


def test_the_first_check_waits():
    config = CONFIG.model_copy(update={"health_check_first_wait_s": 2.0})
    with FakeEngineServer(HEALTHY) as engine, monitoring({"engine": engine}, config) as (monitor, _):
        start_s = time.monotonic()
        monitor.resume()
        wait_until(lambda: engine.requests)
        assert time.monotonic() - start_s > 1.5


def test_a_monitor_that_was_never_started_can_be_stopped():
    monitor = HealthMonitor(CONFIG, dict, lambda name, fault: None)
    monitor.stop()
    monitor.stop()


def test_a_check_that_hangs_holds_up_neither_a_refit_nor_the_end_and_is_not_judged(monkeypatch):
    monkeypatch.setattr(health_monitor, "_SETTLE_S", 0.2, raising=False)
    asked, let_go, dead = threading.Event(), threading.Event(), []

    async def hang(urls, endpoint, headers, timeout_s):
        asked.set()
        await asyncio.to_thread(let_go.wait, 4)
        return {"hangs": Health("no answer", is_gone=True)}

    monkeypatch.setattr(health_monitor, "check_engines", hang)
    monitor = HealthMonitor(CONFIG, lambda: {"hangs": "url"}, lambda name, fault: dead.append(name))
    monitor.start()
    monitor.resume()
    assert asked.wait(10)
    monitor.suspend()
    is_free = not let_go.is_set() and monitor._round.locked()
    monitor.resume()
    let_go.set()
    monitor.suspend()
    monitor.stop()
    assert is_free
    assert dead == []


def test_a_round_that_breaks_is_not_the_last():
    calls = []

    def engines():
        calls.append(1)
        if len(calls) == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return {"gone": gone.url}

    with FakeEngineServer() as gone:
        pass
    dead = []
    monitor = HealthMonitor(CONFIG, engines, lambda name, fault: dead.append(name))
    monitor.start()
    monitor.resume()
    wait_until(lambda: dead)
    monitor.stop()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS])
def test_what_this_process_cannot_do_is_no_engines_death(monkeypatch, number):
    async def get(self, url, **_):
        raise httpx.ConnectError("All connection attempts failed") from OSError(number, "no socket")

    monkeypatch.setattr(httpx.AsyncClient, "get", get)
    health = asyncio.run(check_engines({"engine 0": "http://x"}, "/model_info", {}, 1.0))["engine 0"]
    assert not health.is_gone
    assert health.fault == f"no connection from here: All connection attempts failed: [Errno {number}] no socket"
