"""Who is taken for dead after a request has failed, and what becomes of a router that has ended. No server."""

import httpx
import pytest

from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.models.generation.interfaces import EnginesLostError
from nemo_rl.models.generation.sglang import dispatcher as dispatcher_module
from nemo_rl.models.generation.sglang.access import AccessKeys
from nemo_rl.models.generation.sglang.dispatcher import EngineDispatcher
from nemo_rl.models.generation.sglang.engine_pool import Engine, EnginePool, EngineState
from nemo_rl.models.generation.sglang.health_monitor import Health
from nemo_rl.models.generation.sglang.http_client import transport_error
from nemo_rl.models.generation.sglang.sampler import Endpoint


class Pool(EnginePool):
    """Engines without actors."""

    def __init__(self, num_engines):
        super().__init__(lambda options, number: None, lambda number, url: None)
        self._engines = [
            Engine(i, None, None, None, None, EngineState.READY, url=f"http://127.0.0.1:{i + 1}")
            for i in range(num_engines)
        ]

    def end(self, engine, fault):
        return self.leave_state(engine, EngineState.READY, EngineState.DEAD, fault)


class Router:
    name, url = "router", "http://router"

    def __init__(self, alive=True):
        self.alive, self.known, self.starts = alive, set(), []

    def is_alive(self):
        return self.alive

    def start(self, limit_s):
        self.starts.append(limit_s)
        self.alive, self.known = True, set()

    def set_engines(self, urls, deadline):
        assert self.alive
        self.known = set(urls)
        return set()


@pytest.fixture
def pool(monkeypatch):
    async def all_answer(urls, endpoint, headers, timeout_s):
        return dict.fromkeys(urls, Health())

    monkeypatch.setattr(dispatcher_module, "check_engines", all_answer)
    return Pool(2)


@pytest.fixture
def dispatcher(pool):
    made = EngineDispatcher(pool, AccessKeys.make())
    made.serve(pool.in_state(EngineState.READY), Deadline(5))
    return made


def raised(engine, kind):
    """As the sampler has it: with its cause."""
    cause = kind("closed")
    try:
        raise transport_error(engine.name, "/generate", 1.0, cause) from cause
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("kind", "attempt", "is_lost"),
    [
        (httpx.RemoteProtocolError, 0, False),
        (httpx.RemoteProtocolError, 1, True),
        (httpx.ReadError, 2, True),
        (httpx.ConnectError, 1, False),
    ],
)
def test_an_engine_that_closes_the_connection_of_a_request_again_is_lost(pool, dispatcher, kind, attempt, is_lost):
    engine = pool.in_state(EngineState.READY)[1]
    dispatcher.report(Endpoint(engine.name, engine.url), attempt, raised(engine, kind))
    assert (engine in pool.in_state(EngineState.DEAD)) == is_lost


def test_the_last_engine_that_closes_connections_is_replaced_and_does_not_end_the_run(pool, dispatcher):
    for engine in pool.in_state(EngineState.READY)[1:]:
        dispatcher.lose(engine.name, "died")
    (engine,) = pool.in_state(EngineState.READY)
    with pytest.raises(EnginesLostError, match="fails requests: RemoteProtocolError: closed"):
        dispatcher.report(Endpoint(engine.name, engine.url), 1, raised(engine, httpx.RemoteProtocolError))


def test_a_router_that_ended_while_nobody_asked_is_started_again_by_the_next_refit(pool, dispatcher):
    dispatcher.router = router = Router(alive=False)
    engines = pool.in_state(EngineState.READY)
    dispatcher.serve(engines, Deadline(7.0))
    assert router.known == {engine.url for engine in engines}
    assert len(router.starts) == 1
    assert router.starts[0] <= 7.0
    dispatcher.serve(engines, Deadline(7.0))
    assert len(router.starts) == 1


def test_a_router_that_ended_is_started_again_after_a_failed_request(pool, dispatcher):
    dispatcher.router = router = Router(alive=False)
    engine = pool.in_state(EngineState.READY)[0]
    dispatcher.report(Endpoint("router", router.url), 0, raised(engine, httpx.ConnectError))
    assert len(router.known) == 2
