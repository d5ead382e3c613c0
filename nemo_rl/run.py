"""One GRPO run, from a validated config to an exported model and a picture."""

import logging
import signal
import sys
from types import FrameType

from nemo_rl.algorithms.grpo import grpo_train
from nemo_rl.config.loader import dump_yaml
from nemo_rl.config.schema import MasterConfig
from nemo_rl.setup import Inputs, start_participants
from nemo_rl.utils.metrics import MetricsLogger
from nemo_rl.utils.plot import plot_run
from nemo_rl.utils.run_folder import make_run_folder
from nemo_rl.utils.seed import seed_everything

logger = logging.getLogger(__name__)


def run_grpo(config: MasterConfig, inputs: Inputs) -> None:
    """Train, export, draw. Everything that it starts ends with it."""
    # Without this SIGTERM would skip the clean-up.
    signal.signal(signal.SIGTERM, _exit)
    seed_everything(config.grpo.seed)
    folder = make_run_folder(config.logger.log_dir)
    folder.config.write_text(dump_yaml(config), encoding="utf-8")
    with MetricsLogger(
        folder.path, num_steps=config.grpo.max_num_steps, tensorboard=config.logger.tensorboard_enabled
    ) as metrics:
        metrics.note(f"run folder: {folder.path}")
        with start_participants(config, inputs, folder, metrics) as participants:
            grpo_train(config, participants)
            if config.checkpointing.enabled:
                target = config.checkpointing.checkpoint_dir or str(folder.exported_model)
                participants.policy.export_hf(target)
                metrics.note(f"trained model: {target}")
        metrics.note(f"picture: {plot_run(folder.path)}")


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
