"""What the router is started with; that it does it is in test_sglang_generation.py."""

import json
import signal
import subprocess
import sys
import time

import httpx
import psutil
import pytest
from sglang_config import make_config
from sglang_router.router_args import RouterArgs

from nemo_rl.config.schema import SGLangRouterConfig
from nemo_rl.models.generation.sglang.sglang_router import router_settings


def _settings(**router):
    config = make_config(router=router, server={"request_timeout_s": 10.5})
    return router_settings(config, host="::1", port=5, metrics_port=6)


def test_every_setting_is_one_of_the_routers():
    arguments = RouterArgs(**_settings())
    assert (arguments.host, arguments.port) == ("[::1]", 5)
    assert (arguments.prometheus_host, arguments.prometheus_port) == ("::1", 6)


def test_the_driver_alone_decides_who_is_alive_and_what_is_sent_again():
    settings = _settings()
    for name in ("disable_health_check", "disable_circuit_breaker", "disable_retries"):
        assert settings[name] is True


def test_the_routers_time_limit_of_a_request_never_comes_first():
    assert _settings()["request_timeout_secs"] == 41


def test_the_users_keys_arrive():
    asked = {"policy": "cache_aware", "cache_threshold": 0.5, "balance_abs_threshold": 3, "balance_rel_threshold": 2.0}
    assert asked.items() <= _settings(**asked).items()


@pytest.mark.parametrize("policy", SGLangRouterConfig.model_fields["policy"].annotation.__args__)
def test_the_router_knows_every_policy_that_the_schema_allows(policy):
    from sglang_router.router import policy_from_str

    assert policy_from_str(policy) is not None


def test_nothing_of_it_is_secret():
    assert "key" not in json.dumps(_settings())


def test_the_process_wants_a_key_file():
    module = "nemo_rl.models.generation.sglang.router_process"
    done = subprocess.run([sys.executable, "-m", module, "{}", "--x", "y"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "expected SETTINGS --config KEYS" in done.stderr


_DRIVER = """
import sys, time
from pathlib import Path
from nemo_rl.config.schema import PolicyConfig
from nemo_rl.models.generation.sglang.access import AccessKeys
from nemo_rl.models.generation.sglang.sglang_router import SGLangRouter
config = PolicyConfig.model_validate_json(sys.argv[1])
router = SGLangRouter(cfg=config, keys=AccessKeys.make(), host=sys.argv[2], log_file=Path(sys.argv[3]))
router.start()
sys.stdout.write(router.url + "\\n")
sys.stdout.flush()
time.sleep(300)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_router_listens_where_it_is_told_and_ends_with_the_driver_however_that_ends(tmp_path, host, number):
    arguments = [make_config().model_dump_json(by_alias=True), host, str(tmp_path / "router.log")]
    driver = subprocess.Popen([sys.executable, "-c", _DRIVER, *arguments], stdout=subprocess.PIPE, text=True)
    with driver:
        url = driver.stdout.readline().strip()
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
        family = psutil.Process(driver.pid).children(recursive=True)
        listening = [
            connection.laddr
            for process in family
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert {address.ip for address in listening} == {host}
        assert len(listening) == 2
        driver.send_signal(number)
    end_s = time.monotonic() + 20
    while [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < end_s
        time.sleep(0.1)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", trust_env=False)
