import os
import socket
import stat
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from nemo_rl.models.generation.sglang.access import AccessKeys
from nemo_rl.models.generation.sglang.server_process import (
    PortTakenError,
    ServerProcess,
    ServerStartError,
    start_on_free_ports,
)
from nemo_rl.utils.ports import ReservedPort

NOBODY = 9
"""A port that nobody listens on."""
KEYS = AccessKeys("0123456789abcdef" * 4, "fedcba9876543210" * 4)
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
subprocess.Popen([sys.executable, "-c", ignore], start_new_session=True)
sys.stdout.write("booting\\n")
sys.stdout.flush()
time.sleep(300)
"""
READ_KEYS = "import sys; keys = open(sys.argv[sys.argv.index('--config') + 1]).read();"
HEALTHY = """
import socket, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

HTTPServer.address_family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
HTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def _start(script, tmp_path, *arguments, host="127.0.0.1", port=NOBODY):
    command = [sys.executable, "-c", script, *arguments]
    return ServerProcess(command, os.environ, tmp_path / "logs" / "server.log", host, port, KEYS)


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
    assert type(caught.value) is ServerStartError
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


def test_a_supervisor_that_breaks_ends_what_it_started(tmp_path, temporary_folder):
    """Somebody who cleans up temporary files takes the file of the keys away before the server has read it."""
    process = _start(STUBBORN, tmp_path)
    family = _family(process, 2)
    (file,) = temporary_folder.glob("*/keys.yaml")
    file.unlink()
    assert psutil.wait_procs(family, timeout=15)[1] == []
    with pytest.raises(ServerStartError, match=r"ended with status(?s:.*)No such file"):
        process.wait_until_healthy(timeout_s=20)


def _serve(tmp_path, host, port):
    return _start(HEALTHY, tmp_path, host, str(port), host=host, port=port)


def _listeners(port):
    return [c for c in psutil.net_connections("tcp") if c.laddr.port == port and c.status == psutil.CONN_LISTEN]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_healthy_once_its_own_process_answers_at_the_url(tmp_path, host):
    with ReservedPort(host) as port:
        process = _serve(tmp_path, host, port.number)
        process.wait_until_healthy(timeout_s=20)
    assert process.url == (f"http://127.0.0.1:{port.number}" if host == "127.0.0.1" else f"http://[::1]:{port.number}")
    assert process.is_alive()
    assert len(_listeners(port.number)) == 1
    process.stop()
    assert not process.is_alive()
    assert _listeners(port.number) == []


def test_somebody_else_who_answers_at_the_url_does_not_count(tmp_path):
    with ReservedPort("127.0.0.1") as port:
        other = subprocess.Popen([sys.executable, "-c", HEALTHY, "127.0.0.1", str(port.number)])
        try:
            waiting = _start("import time; time.sleep(300)", tmp_path, port=port.number)
            with pytest.raises(ServerStartError, match="not healthy after"):
                waiting.wait_until_healthy(timeout_s=3)
            late = _serve(tmp_path, "127.0.0.1", port.number)
            with pytest.raises(PortTakenError, match="Address already in use"):
                late.wait_until_healthy(timeout_s=20)
        finally:
            other.kill()
            other.wait()
    again = _start("import sys; sys.exit(3)", tmp_path)
    with pytest.raises(ServerStartError, match="status 3") as caught:
        again.wait_until_healthy(timeout_s=20)
    # The log of the one before does not count.
    assert type(caught.value) is ServerStartError


@pytest.mark.parametrize(("num_lost", "comes_up"), [(0, True), (2, True), (3, False)])
def test_a_lost_port_is_tried_again_with_others_twice_and_told_in_one_line(tmp_path, caplog, num_lost, comes_up):
    """Another program listens on the first reserved port before the server does, as SO_REUSEADDR lets it."""
    tried: list[int] = []
    with ExitStack() as others:

        def launch(port, _second):
            if len(tried) < num_lost:
                others.enter_context(_listen(port))
            tried.append(port)
            return _serve(tmp_path, "127.0.0.1", port)

        if comes_up:
            process = start_on_free_ports("127.0.0.1", 20, launch)
            assert process.url == f"http://127.0.0.1:{tried[-1]}"
            process.stop()
        else:
            with pytest.raises(PortTakenError):
                start_on_free_ports("127.0.0.1", 20, launch)
    assert len(set(tried)) == min(num_lost + 1, 3)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        f"SGLang server http://127.0.0.1:{port} lost a port to another program; attempt {attempt} of 3"
        for attempt, port in enumerate(tried[:-1], start=2)
    ]


def _listen(port):
    other = socket.socket()
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    other.bind(("127.0.0.1", port))
    other.listen()
    return other


def test_the_server_gets_its_keys_and_nobody_else_sees_them(tmp_path, temporary_folder):
    script = READ_KEYS + "print('booting', keys, flush=True); import time; time.sleep(300)"
    process = _start(script, tmp_path)
    family = _family(process, 1)
    try:
        (folder,) = temporary_folder.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert list(folder.iterdir()) == []
        log = process.log_file.read_text()
        assert log == 'booting {"api-key": "<redacted>", "admin-api-key": "<redacted>"}\n'
        for member in family:
            shown = " ".join(member.cmdline()) + Path(f"/proc/{member.pid}/environ").read_text()
            assert "--config" in shown
            assert KEYS.api_key not in shown
            assert KEYS.admin_api_key not in shown
    finally:
        process.stop()


def test_files_of_the_server_are_its_users_alone(tmp_path):
    process = _start("import os; raise ValueError(oct(os.umask(0)))", tmp_path)
    with pytest.raises(ServerStartError, match="ValueError: 0o77"):
        process.wait_until_healthy(timeout_s=20)


def test_an_error_message_holds_no_key(tmp_path, temporary_folder):
    process = _start(READ_KEYS + "raise ValueError(keys)", tmp_path)
    with pytest.raises(ServerStartError, match="ValueError: .*<redacted>") as caught:
        process.wait_until_healthy(timeout_s=20)
    assert KEYS.api_key not in str(caught.value)
    assert KEYS.admin_api_key not in str(caught.value)
    assert list(temporary_folder.iterdir()) == []


@pytest.mark.parametrize("how", ["stop", "death"])
def test_a_key_file_that_was_never_read_goes_with_the_server(tmp_path, temporary_folder, how):
    script = "import sys, time; print('booting', flush=True); time.sleep(300 if sys.argv[1] == 'stop' else 2)"
    process = _start(script, tmp_path, how)
    _family(process, 1)
    (folder,) = temporary_folder.iterdir()
    assert [file.name for file in folder.iterdir()] == ["keys.yaml"]
    if how == "stop":
        process.stop()
    with pytest.raises(ServerStartError):
        process.wait_until_healthy(timeout_s=20)
    assert list(temporary_folder.iterdir()) == []


OWNER = """
import os, sys, time
from pathlib import Path
from nemo_rl.models.generation.sglang.access import AccessKeys
from nemo_rl.models.generation.sglang.server_process import ServerProcess
command = [sys.executable, "-c", "import time; print('booting', flush=True); time.sleep(300)"]
process = ServerProcess(command, os.environ, Path(sys.argv[1]), "127.0.0.1", 9, AccessKeys.make())
print(process.pid, flush=True)
time.sleep(300)
"""


def test_a_killed_owner_leaves_neither_process_nor_key_file(tmp_path, temporary_folder):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    try:
        supervisor = psutil.Process(int(owner.stdout.readline()))
        while "booting" not in (tmp_path / "log").read_text():
            time.sleep(0.05)
        family = [supervisor, *supervisor.children(recursive=True)]
    finally:
        owner.kill()
        owner.wait()
    assert psutil.wait_procs(family, timeout=20)[1] == []
    assert list(temporary_folder.iterdir()) == []


def test_output_of_any_shape_reaches_the_log_before_the_end_is_seen(tmp_path):
    script = "import sys; sys.stdout.write('x' * 3_000_000 + '\\r' + 'no end'); sys.exit(5)"
    process = _start(script, tmp_path)
    with pytest.raises(ServerStartError, match="status 5"):
        process.wait_until_healthy(timeout_s=20)
    assert process.log_file.read_text() == "x" * 3_000_000 + "\n" + "no end"
