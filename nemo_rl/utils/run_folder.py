"""The folder of one run."""

from pathlib import Path


def make_run_folder(log_dir: str) -> Path:
    """A new `exp_NNN` in `log_dir`, one above the highest there."""
    parent = Path(log_dir)
    parent.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(path.name[4:]) for path in parent.glob("exp_[0-9]*") if path.name[4:].isdigit()), default=0)
    while True:
        folder = parent / f"exp_{number:03d}"
        try:
            folder.mkdir()
        except FileExistsError:  # another run took it in between
            number += 1
            continue
        return folder
