"""The folder of one run."""

import os
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.config.errors import ConfigError, refusal


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    @property
    def engine_logs(self) -> Path:
        return self.path / "engines"

    @property
    def trainer_logs(self) -> Path:
        return self.path / "trainers"

    @property
    def refit_export(self) -> Path:
        """What a proof of a refit writes and deletes."""
        return self.path / "refit_export"

    @property
    def exported_model(self) -> Path:
        return self.path / "hf_model"


def check_writable(key: str, folder: str) -> None:
    """Raises ConfigError when `folder` cannot be written to, or made. Makes nothing."""
    path = Path(folder).expanduser().absolute()
    existing = next(part for part in (path, *path.parents) if part.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK) or os.statvfs(existing).f_blocks == 0:
        raise ConfigError([refusal(key, folder, f"needs a folder that can be written; {existing} is none")])


def make_run_folder(log_dir: str) -> RunFolder:
    """A new `exp_NNN` in `log_dir`, one above the highest there."""
    parent = Path(log_dir).expanduser().absolute()
    parent.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(path.name[4:]) for path in parent.glob("exp_[0-9]*") if path.name[4:].isdigit()), default=0)
    while True:
        folder = RunFolder(parent / f"exp_{number:03d}")
        try:
            folder.path.mkdir()
        except FileExistsError:  # another run took it in between
            number += 1
            continue
        folder.engine_logs.mkdir()
        folder.trainer_logs.mkdir()
        return folder
