"""Where a run writes."""

from pathlib import Path

import pytest

from nemo_rl.config.errors import ConfigError
from nemo_rl.utils.run_folder import check_writable, make_run_folder


def test_each_run_has_a_number_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "logs/exp_007").mkdir(parents=True)
    (tmp_path / "logs/exp_other").mkdir()
    names = [make_run_folder(str(tmp_path / "logs")).path.name for _ in range(2)]
    assert names == ["exp_008", "exp_009"]


def test_a_folder_that_can_be_made_is_writable_and_is_not_made(tmp_path: Path) -> None:
    check_writable("logger.log_dir", str(tmp_path / "a/b"))
    assert list(tmp_path.iterdir()) == []


def test_a_file_or_a_virtual_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file/below", Path("/proc/model")):
        with pytest.raises(ConfigError, match="logger.log_dir: got .* needs a folder that can be written"):
            check_writable("logger.log_dir", str(folder))
