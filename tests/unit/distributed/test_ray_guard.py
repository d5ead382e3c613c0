"""Plain processes in place of Ray's: what is started under guard ends with the driver, and nothing else does."""

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

DRIVER = """
import subprocess, sys, time
from nemo_rl.distributed.ray_guard import guarded

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
# Its child has no mark: it is known by its parent alone.
DAEMON = [sys.executable, "-c", f"import subprocess, time; print(subprocess.Popen({SLEEP!r}, env={{}}).pid, flush=True); time.sleep(600)"]
other = subprocess.Popen(SLEEP)
with guarded():
    daemon = subprocess.Popen(DAEMON, stdout=subprocess.PIPE, text=True)
time.sleep(2)
print(other.pid, daemon.pid, daemon.stdout.readline(), flush=True)
if sys.stdin.readline().strip() == "end_daemon":
    daemon.kill()
    daemon.wait()
time.sleep(600)
"""


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> Iterator[tuple[psutil.Popen, list[psutil.Process]]]:
    """The driver; its unguarded child, the guarded one, and the child of that."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = psutil.Popen([sys.executable, "-c", DRIVER], text=True, **pipes)
    family = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
    process.stdin.write(f"{request.param}\n")
    process.stdin.flush()
    yield process, family
    for left in (process, *family):
        try:
            left.kill()
        except psutil.NoSuchProcess:
            continue


def guard_of(driver: psutil.Popen) -> list[psutil.Process]:
    children = [child for child in driver.children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in children if "nemo_rl.distributed.ray_guard" in child.cmdline()]


@pytest.mark.parametrize("driver", ["stay"], indirect=True)
def test_what_is_guarded_ends_with_a_killed_driver(driver: tuple[psutil.Popen, list[psutil.Process]]) -> None:
    process, (other, daemon, grandchild) = driver
    (guard,) = guard_of(process)
    process.kill()
    process.wait()
    gone, _ = psutil.wait_procs([daemon, grandchild, guard], timeout=10)
    assert {ended.pid for ended in gone} == {daemon.pid, grandchild.pid, guard.pid}
    assert other.is_running()


@pytest.mark.parametrize("driver", ["end_daemon"], indirect=True)
def test_a_child_of_a_daemon_that_ended_before_the_driver_is_still_known(
    driver: tuple[psutil.Popen, list[psutil.Process]],
) -> None:
    process, (_, daemon, grandchild) = driver
    psutil.wait_procs([daemon], timeout=10)
    (guard,) = guard_of(process)
    assert grandchild.is_running()
    process.kill()
    process.wait()
    gone, _ = psutil.wait_procs([grandchild, guard], timeout=10)
    assert len(gone) == 2
