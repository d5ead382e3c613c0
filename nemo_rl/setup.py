"""The one place that wires concrete policy, generation and synchronizer.

`prepare_inputs` looks at everything that a person may have got wrong, on the driver and before any actor exists.
`start_participants` then starts Ray, the engines and the trainer ranks.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ray
from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.grpo import Participants
from nemo_rl.algorithms.loss import ClippedPGLoss
from nemo_rl.config.consistency import NO_VALIDATION
from nemo_rl.config.layout import Layout, make_layout
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data.chat import ChatEncoder, EncodedPrompt, encode_problems, load_tokenizer
from nemo_rl.data.datasets import check_pictures, load_problems
from nemo_rl.data.interfaces import DatasetSplit
from nemo_rl.data.loader import PromptLoader, collate_prompts
from nemo_rl.data.vision import VisionProcessor
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, start_ray
from nemo_rl.environments.factory import make_environment
from nemo_rl.environments.interfaces import EnvironmentInterface
from nemo_rl.models.generation.sglang.sglang_generation import SGLangGeneration
from nemo_rl.models.model_source import check_model, resolve_model
from nemo_rl.models.policy.checkpoint import check_checkpoint
from nemo_rl.models.policy.compiled_blocks import check_compiler
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.utils import PRECISION_DTYPES
from nemo_rl.models.policy.vision import check_vision_tower
from nemo_rl.models.policy.workers.dtensor_policy_worker_v2 import DTensorPolicyWorkerV2
from nemo_rl.utils.metrics import MetricsLogger
from nemo_rl.utils.run_folder import RunFolder, check_writable
from nemo_rl.weight_sync.factory import create_weight_synchronizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """What the config names, found and read."""

    layout: Layout
    device: str
    """`cpu` or `cuda`."""
    model_folder: Path
    tokenizer: PreTrainedTokenizerBase
    train_prompts: PromptLoader
    validation_prompts: BatchedDataDict | None
    environment: EnvironmentInterface
    vision: VisionProcessor | None = None
    """None when no problem has a picture."""


def prepare_inputs(config: MasterConfig, problems: DatasetSplit | None = None) -> Inputs:
    """Find the model, read the data.

    Args:
        problems: of `config.data`, where they have been read.

    Raises:
        ValueError: key, value and what is allowed.
    """
    layout = make_layout(config)
    device = _resolve_device(config.cluster.device)
    if device == "cpu" and config.policy.dtensor_cfg.cpu_offload:
        raise ValueError("policy.dtensor_cfg.cpu_offload: got true; allowed on cuda, and this run is on cpu")
    if config.policy.dtensor_cfg.torch_compile:
        check_compiler(device)
        logger.info("policy.dtensor_cfg.torch_compile: step 1 is silent while it compiles each block, minutes on a CPU")
    problems = problems or load_problems(config.data)
    environment = make_environment(config.env, config.data)
    environment.check_references([problem.reference for problem in (*problems.train, *problems.validation)])
    model_folder = resolve_model(config.policy.model_name)
    vocab_size = check_model(model_folder)
    check_checkpoint(
        model_folder,
        PRECISION_DTYPES[config.policy.precision],
        lora=config.policy.dtensor_cfg.lora_cfg.if_enabled,
        tensor_parallel_size=config.policy.dtensor_cfg.tensor_parallel_size,
    )
    if config.policy.freeze_vision_tower:
        check_vision_tower(model_folder)
    tokenizer = load_tokenizer(config.policy.tokenizer, model_folder)
    vision = VisionProcessor.load(model_folder, config.policy.model_name) if _has_images(problems) else None
    check_pictures(problems)
    encoder = ChatEncoder(tokenizer, config.policy.tokenizer.chat_template, vision)
    pad_token_id = int(tokenizer.pad_token_id)
    limit, validates = config.policy.max_total_sequence_length, config.grpo.validates
    needed = config.grpo.num_prompts_per_step
    train = encode_problems(problems.train, encoder, limit, kind="training", at_least=needed)
    validation = encode_problems(problems.validation, encoder, limit, kind="validation", at_least=int(validates))
    _check_token_ids(config, vocab_size, [*train, *validation])
    if validates and not validation:
        raise ValueError(f"data: no validation problem is left; {NO_VALIDATION}")
    check_writable("logger.log_dir", config.logger.log_dir)
    if config.checkpointing.enabled and config.checkpointing.checkpoint_dir is not None:
        check_writable("checkpointing.checkpoint_dir", config.checkpointing.checkpoint_dir)
    return Inputs(
        layout=layout,
        device=device,
        model_folder=model_folder,
        tokenizer=tokenizer,
        train_prompts=PromptLoader(
            train,
            batch_size=config.grpo.num_prompts_per_step,
            pad_token_id=pad_token_id,
            seed=config.grpo.seed,
            shuffle=config.data.shuffle,
            vision=vision,
        ),
        validation_prompts=(
            collate_prompts(validation[: config.grpo.max_val_samples], pad_token_id, vision) if validation else None
        ),
        environment=environment,
        vision=vision,
    )


def _has_images(problems: DatasetSplit) -> bool:
    return any(problem.images for problem in (*problems.train, *problems.validation))


def _check_token_ids(config: MasterConfig, vocab_size: int, prompts: Sequence[EncodedPrompt]) -> None:
    """An id that the model does not have would end the engine."""
    highest = max((max(prompt.token_ids) for prompt in prompts), default=0)
    if highest >= vocab_size:
        name = config.policy.tokenizer.name or config.policy.model_name
        raise ValueError(
            f"policy.tokenizer.name: {name!r} gives token id {highest}; the model has {vocab_size}, 0 to {vocab_size - 1}"
        )
    for token_id in config.policy.generation.stop_token_ids or ():
        if token_id >= vocab_size:
            raise ValueError(f"policy.generation.stop_token_ids: got {token_id}; allowed: 0 to {vocab_size - 1}")


def _resolve_device(asked: str) -> str:
    import torch

    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise ValueError("cluster.device: got 'cuda'; no CUDA device here, allowed: auto, cpu")
    return "cuda" if available and asked != "cpu" else "cpu"


@contextmanager
def start_participants(
    config: MasterConfig,
    inputs: Inputs,
    folder: RunFolder,
    metrics: MetricsLogger,
    worker_class: type[DTensorPolicyWorkerV2] = DTensorPolicyWorkerV2,
) -> Iterator[Participants]:
    """Start everything; whatever way the block ends, end everything.

    Raises:
        ConfigError: the combination is not supported, or the cluster has fewer slots than asked.
    """
    layout, device = inputs.layout, inputs.device
    policy = Policy(cfg=config.policy, worker_class=worker_class)
    generation = SGLangGeneration(cfg=config.policy, layout=layout, device=device)
    # Refuses what is unsupported while nothing has been started.
    synchronizer = create_weight_synchronizer(
        policy=policy,
        generation=generation,
        generation_backend=config.policy.generation.backend,
        colocated=config.policy.generation.colocated.enabled,
        refit_buffer_size_gb=config.policy.refit_buffer_size_gb,
        refit=config.refit,
        export_folder=folder.refit_export,
    )
    metrics.note(
        f"starting {layout.num_engines} engine(s) of {layout.num_slots_per_engine} slot(s) and "
        f"{layout.num_train_slots} trainer rank(s) on {device}; about a minute, logs in the run folder"
    )
    with ExitStack() as stack:
        start_ray(device=device, num_slots=layout.num_slots, num_nodes=layout.num_nodes)
        stack.callback(ray.shutdown)
        engine_slots, trainer_slots = _reserve_slots(layout, device)
        stack.callback(generation.shutdown)
        stack.callback(policy.shutdown)
        generation.launch(
            engine_slots,
            model_folder=inputs.model_folder,
            tokenizer=inputs.tokenizer,
            log_folder=folder.engine_logs,
            image_token_id=inputs.vision.image_token_id if inputs.vision else None,
        )
        policy.launch(
            trainer_slots,
            model_folder=inputs.model_folder,
            device=device,
            needs_reference=config.loss_fn.reference_policy_kl_penalty > 0,
            seed=config.grpo.seed,
            log_folder=folder.trainer_logs,
        )
        policy.wait_ready()
        generation.wait_ready()
        yield Participants(
            policy=policy,
            generation=generation,
            synchronizer=synchronizer,
            environment=inputs.environment,
            tokenizer=inputs.tokenizer,
            train_prompts=inputs.train_prompts,
            validation_prompts=inputs.validation_prompts,
            loss_fn=ClippedPGLoss(config.loss_fn),
            metrics=metrics,
        )
        # After a failure the group may have nobody left to answer; everything is ended then all the same.
        synchronizer.shutdown()


def _reserve_slots(layout: Layout, device: str) -> tuple[RayVirtualCluster, RayVirtualCluster]:
    """The slots of the engines, and of the trainer ranks; the larger bundles first, so that there is room for both."""
    engines = partial(
        RayVirtualCluster, name="engines", slots=[layout.engine_share] * layout.num_engines, device=device
    )
    trainers = partial(RayVirtualCluster, name="trainers", slots=layout.trainer_shares, device=device)
    if layout.shares_gpus:
        trainer_slots = trainers()
        return engines(), trainer_slots
    return engines(), trainers()
