"""Bad configs are refused by key, all in one line, before anything is started."""

import subprocess
import sys
from pathlib import Path

import pytest
from bad_configs import BAD_CONFIGS, CPU_CONFIG, ONE_OF_EACH_KIND, ROOT, BadConfig

from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import load_config


def named(case: BadConfig) -> str:
    return " ".join(case.overrides)


@pytest.mark.parametrize("case", BAD_CONFIGS, ids=named)
def test_a_bad_config_is_refused_by_key(case: BadConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(CPU_CONFIG, case.overrides)
    (line,) = caught.value.lines
    assert line.startswith(f"{case.key}: {case.says}")


def test_no_two_are_the_same_and_they_cover_many_keys() -> None:
    assert len({case.overrides for case in BAD_CONFIGS}) == len(BAD_CONFIGS)
    assert len({case.key for case in BAD_CONFIGS}) >= 40


@pytest.mark.parametrize("case", ONE_OF_EACH_KIND, ids=named)
def test_the_real_script_ends_with_2_and_one_line_before_anything_starts(tmp_path: Path, case: BadConfig) -> None:
    log_dir = tmp_path / "logs"
    command = [sys.executable, str(ROOT / "examples/run_grpo.py"), "--config", str(CPU_CONFIG), *case.overrides]
    done = subprocess.run(
        [*command, f"logger.log_dir={log_dir}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{case.key}: {case.says}")
    assert not log_dir.exists()
