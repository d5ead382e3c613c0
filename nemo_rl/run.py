"""One GRPO run, from a validated config to an exported model and a picture."""

import logging
import signal
import sys
from pathlib import Path
from types import FrameType

from nemo_rl.algorithms.grpo import count_steps, grpo_train
from nemo_rl.config.loader import dump_yaml
from nemo_rl.config.schema import MasterConfig
from nemo_rl.distributed.weight_transfer.errors import TransferError
from nemo_rl.distributed.worker_group import WorkerGroupError
from nemo_rl.models.generation.interfaces import EnginesFailedError, ReplacementsUsedUpError
from nemo_rl.models.generation.sglang.http_client import EngineError
from nemo_rl.models.generation.sglang.server_process import ServerStartError
from nemo_rl.models.policy.interfaces import PolicyInterface
from nemo_rl.setup import Inputs, start_participants
from nemo_rl.utils.metrics import MetricsLogger
from nemo_rl.utils.plot import plot_run
from nemo_rl.utils.run_folder import RunFolder, make_run_folder
from nemo_rl.utils.seed import seed_everything

logger = logging.getLogger(__name__)

RUN_FAILURES = (
    WorkerGroupError,
    TransferError,
    EnginesFailedError,
    ReplacementsUsedUpError,
    EngineError,
    ServerStartError,
    TimeoutError,
)
"""Something that the run needs has failed: their text says who, what and why, and a traceback would bury it."""


def run_grpo(config: MasterConfig, inputs: Inputs) -> None:
    """Train, export, draw. Everything that it starts ends with it."""
    # Without this SIGTERM would skip the clean-up.
    signal.signal(signal.SIGTERM, _exit)
    seed_everything(config.grpo.seed)
    folder = make_run_folder(config.logger.log_dir)
    folder.config.write_text(dump_yaml(config), encoding="utf-8")
    with MetricsLogger(
        folder.path, num_steps=count_steps(config, inputs.train_prompts), tensorboard=config.logger.tensorboard_enabled
    ) as metrics:
        metrics.note(f"run folder: {folder.path}")
        with start_participants(config, inputs, folder, metrics) as participants:
            grpo_train(config, participants)
            metrics.note(f"picture: {plot_run(folder.path)}")
            if config.checkpointing.enabled:
                export_trained(config, participants.policy, folder, metrics)


def export_trained(config: MasterConfig, policy: PolicyInterface, folder: RunFolder, metrics: MetricsLogger) -> None:
    """Write the trained model, and of a run with LoRA what `checkpointing.lora_export` asks for."""
    chosen, what = config.checkpointing.checkpoint_dir, config.checkpointing.lora_export
    target = Path(chosen).expanduser().absolute() if chosen else folder.exported_model
    has_adapter = config.policy.dtensor_cfg.lora_cfg.enabled
    if not has_adapter or what != "adapter":
        policy.export_hf(str(target))
        metrics.note(f"trained model: {target}")
    if has_adapter and what != "merged":
        # Beside it and not in it: a model folder that holds other weights too is refused.
        beside = target.with_name(f"{target.name}_adapter")
        policy.export_adapter(str(beside))
        metrics.note(f"adapter: {beside}")


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
