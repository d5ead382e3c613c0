import os
import sys
import time

import psutil
import pytest
from fake_server import FakeEngineServer

from nemo_rl.models.generation.sglang.server_process import ServerProcess, ServerStartError

NOBODY = "http://127.0.0.1:9"
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
subprocess.Popen([sys.executable, "-c", ignore], start_new_session=True)
sys.stdout.write("booting\\n")
sys.stdout.flush()
time.sleep(300)
"""


def _start(script, tmp_path, url=NOBODY):
    return ServerProcess([sys.executable, "-c", script], os.environ, tmp_path / "logs" / "server.log", url)


def _family(process, num_processes):
    """The supervisor and `num_processes` below it, once they all run."""
    deadline_s = time.monotonic() + 20
    supervisor = psutil.Process(process.pid)
    while time.monotonic() < deadline_s:
        children = supervisor.children(recursive=True)
        if len(children) == num_processes and "booting" in process.log_file.read_text():
            return [supervisor, *children]
        time.sleep(0.05)
    raise AssertionError(f"{supervisor.children(recursive=True)}")


def test_early_death_is_reported_with_status_and_the_end_of_the_log(tmp_path):
    script = "import sys; [sys.stderr.write(f'line {i}\\n') for i in range(100)]; sys.exit(7)"
    process = _start(script, tmp_path)
    with pytest.raises(ServerStartError, match=r"ended with status 7 while starting") as caught:
        process.wait_until_healthy(timeout_s=60)
    assert str(caught.value).endswith("line 98\nline 99\n")
    assert "line 70\n" in str(caught.value)
    assert "line 69\n" not in str(caught.value)


def test_a_server_that_is_not_healthy_in_time_is_ended_and_reported(tmp_path):
    process = _start(STUBBORN, tmp_path)
    family = _family(process, 2)
    with pytest.raises(ServerStartError, match=r"startup_timeout_s: 0.5\)(?s:.*)booting"):
        process.wait_until_healthy(timeout_s=0.5)
    assert not process.is_alive()
    assert psutil.wait_procs(family, timeout=5)[1] == []


def test_stop_ends_also_what_ignores_sigterm_or_left_the_session_and_is_idempotent(tmp_path):
    process = _start(STUBBORN, tmp_path)
    family = _family(process, 2)
    process.stop()
    process.stop()
    assert psutil.wait_procs(family, timeout=5)[1] == []


def test_orphans_of_a_killed_supervisors_server_die_with_it(tmp_path):
    process = _start("import time; print('booting', flush=True); time.sleep(300)", tmp_path)
    supervisor, server = _family(process, 1)
    supervisor.kill()
    assert psutil.wait_procs([server], timeout=5)[1] == []


def test_healthy_once_the_url_answers(tmp_path):
    with FakeEngineServer({"/health": (200, {})}) as fake:
        process = _start("import time; time.sleep(300)", tmp_path, url=fake.url)
        process.wait_until_healthy(timeout_s=20)
        assert process.is_alive()
        process.stop()
        assert not process.is_alive()
