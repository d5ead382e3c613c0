"""Logging of the driver and of the actors."""

import logging

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(level: int = logging.INFO) -> None:
    """Ours at `level`; libraries from WARNING on."""
    logging.basicConfig(format=FORMAT, datefmt="%H:%M:%S", level=logging.WARNING, force=True)
    logging.getLogger("nemo_rl").setLevel(level)
