"""Logging of the driver and of the actors."""

import logging
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(file: Path | None = None) -> None:
    """Ours from INFO on, libraries from WARNING on; to standard error, or to `file`."""
    handler = logging.StreamHandler() if file is None else logging.FileHandler(file, encoding="utf-8")
    logging.basicConfig(format=FORMAT, datefmt="%H:%M:%S", level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("nemo_rl").setLevel(logging.INFO)
    # It warns that its token authentication is on, which is as it should be.
    logging.getLogger("ray").setLevel(logging.ERROR)
