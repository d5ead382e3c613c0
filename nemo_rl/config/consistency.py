"""What must hold between keys. The schema checks each key alone."""

from collections.abc import Iterator

from nemo_rl.config.errors import ConfigError, refusal, yaml_text
from nemo_rl.config.idle_keys import idle_lines
from nemo_rl.config.layout import make_layout
from nemo_rl.config.schema import ArithmeticDataConfig, MasterConfig, PicturesDataConfig, ResponseDataConfig

_SERVER = "policy.generation.sglang_cfg.sglang_server_config"
_LORA = "policy.dtensor_cfg.lora_cfg"

NO_VALIDATION = "set grpo.val_period=0 grpo.val_at_start=false grpo.val_at_end=false"

RESERVED_ARGS = (
    "--model-path", "--tokenizer-path", "--host", "--port", "--nccl-port", "--dtype", "--tp-size", "--tp",
    "--tensor-parallel-size", "--random-seed", "--device", "--quantization", "--kv-cache-dtype", "--weight-version",
    "--pp-size", "--pipeline-parallel-size", "--config", "--api-key", "--admin-api-key",
    # Front ends that ask for no key, or none that SGLang gives the keys to.
    "--encoder-only", "--grpc-mode", "--grpc-port", "--smg-grpc-mode", "--sidecar", "--tokenizer-worker-num", "--use-ray",
    # They quantise what the policy sends as it is.
    "--quantize-and-serve", "--rl-quant-profile", "--modelopt-quant",
    # It writes both keys to disk.
    "--crash-dump-folder",
    # The engine must read pictures as the trainer does.
    "--mm-process-config", "--image-processor-backend", "--disable-fast-image-processor",
)  # fmt: skip
"""Arguments of the server that repeat or contradict what the program sets."""
RESERVED_PREFIX = "--speculative"
"""A draft model would keep its old weights."""


def check_consistency(config: MasterConfig) -> None:
    """Raises ConfigError with one line per contradiction."""
    lines = [
        *_slot_lines(config),
        *_length_lines(config),
        *_lora_lines(config),
        *_server_lines(config),
        *_data_lines(config),
        *idle_lines(config),
    ]
    if lines:
        raise ConfigError(lines)


def _slot_lines(config: MasterConfig) -> Iterator[str]:
    yield from _step_lines(config)
    try:
        layout = make_layout(config)
    except ConfigError as error:
        yield from error.lines
    else:
        yield from _rank_lines(config, layout.num_train_slots)


def _step_lines(config: MasterConfig) -> Iterator[str]:
    grpo, size = config.grpo, config.policy.train_global_batch_size
    samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    if samples % size:
        step = "grpo.num_prompts_per_step x grpo.num_generations_per_prompt"
        yield refusal("policy.train_global_batch_size", size, f"must divide {step} = {samples}")


def _rank_lines(config: MasterConfig, ranks: int) -> Iterator[str]:
    policy, size = config.policy, config.policy.train_global_batch_size
    tensor_parallel = policy.dtensor_cfg.tensor_parallel_size
    if ranks % tensor_parallel:
        key = "policy.dtensor_cfg.tensor_parallel_size"
        yield refusal(key, tensor_parallel, f"must divide the {ranks} trainer ranks")
        return
    if tensor_parallel > 1 and policy.dtensor_cfg.torch_compile:
        key = "policy.dtensor_cfg.torch_compile"
        yield refusal(key, True, f"not supported with tensor_parallel_size {tensor_parallel}; set {key}=false")
    shards = ranks // tensor_parallel
    if size % shards:
        yield refusal("policy.train_global_batch_size", size, f"must be a multiple of the {shards} data-parallel ranks")
    elif (size // shards) % policy.train_micro_batch_size:
        yield refusal(
            "policy.train_micro_batch_size",
            policy.train_micro_batch_size,
            f"must divide {size // shards}, the samples of one data-parallel rank (policy.train_global_batch_size / "
            f"{shards})",
        )


def _length_lines(config: MasterConfig) -> Iterator[str]:
    limit, new = config.policy.max_total_sequence_length, config.policy.generation.max_new_tokens
    if new >= limit:
        yield refusal(
            "policy.generation.max_new_tokens", new, f"must be below policy.max_total_sequence_length = {limit}"
        )


def _lora_lines(config: MasterConfig) -> Iterator[str]:
    lora, ranks = config.policy.dtensor_cfg.lora_cfg, config.policy.dtensor_cfg.tensor_parallel_size
    tower = config.policy.freeze_vision_tower
    if not lora.enabled:
        if config.checkpointing.lora_export == "adapter":
            yield refusal("checkpointing.lora_export", "adapter", f"there is no adapter; set {_LORA}.enabled=true")
        return
    if lora.target_modules and lora.match_all_linear:
        yield refusal(f"{_LORA}.target_modules", lora.target_modules, f"set {_LORA}.match_all_linear=false with it")
    if not lora.target_modules and not lora.match_all_linear:
        yield refusal(f"{_LORA}.target_modules", [], f"name layers, or set {_LORA}.match_all_linear=true")
    for key, got, allowed, why in (
        (f"{_LORA}.dropout", lora.dropout, 0.0, "the model is in eval mode also for training, so it would do nothing"),
        (f"{_LORA}.use_triton", lora.use_triton, False, "peft has no Triton kernels"),
        ("policy.dtensor_cfg.tensor_parallel_size", ranks, 1, f"with {_LORA}.enabled=true"),
        (
            "policy.freeze_vision_tower",
            tower,
            False,
            f"adapters train alone; name its layers in {_LORA}.exclude_modules",
        ),
    ):
        if got != allowed:
            yield refusal(key, got, f"not supported ({why}); set {key}={yaml_text(allowed)}")


def _server_lines(config: MasterConfig) -> Iterator[str]:
    server = config.policy.generation.sglang_cfg.sglang_server_config
    if config.policy.dtensor_cfg.cpu_offload and config.cluster.device == "cpu":
        yield refusal("policy.dtensor_cfg.cpu_offload", True, "needs CUDA, and cluster.device is cpu")
    if config.cluster.share_gpus:
        yield from _sharing_lines(config)
    if server.weight_update_backend == "nccl" and config.cluster.device == "cpu":
        key = f"{_SERVER}.weight_update_backend"
        yield refusal(key, "nccl", f"needs CUDA, and cluster.device is cpu; set {key}=gloo or null")
    for argument in server.extra_args:
        if is_reserved(argument):
            yield refusal(
                f"{_SERVER}.extra_args", argument, "not allowed: the program sets it from other keys, or rules it out"
            )


def _sharing_lines(config: MasterConfig) -> Iterator[str]:
    server = config.policy.generation.sglang_cfg.sglang_server_config
    if config.cluster.device != "cuda":
        yield refusal("cluster.share_gpus", True, "only with cluster.device=cuda: on CPU a slot is no device")
    if server.num_gpus_per_engine > 1:
        key = f"{_SERVER}.num_gpus_per_engine"
        yield refusal(key, server.num_gpus_per_engine, "only 1 with cluster.share_gpus=true")
    if server.weight_update_backend is None:
        key = f"{_SERVER}.weight_update_backend"
        why = "NCCL refuses two ranks on one GPU, unless it takes them for two hosts' and goes through sockets"
        yield refusal(key, None, f"with cluster.share_gpus=true it must be said: gloo, or nccl ({why})")


def is_reserved(argument: str) -> bool:
    """Whether `--x` or `--x=value` is the server's argument of something that the program sets or rules out.

    The server also understands abbreviations, so `--tokenizer` counts as `--tokenizer-path`.
    """
    name = argument.partition("=")[0]
    if not name.startswith("--") or name == "--":
        return False
    return name.startswith(RESERVED_PREFIX) or any(reserved.startswith(name) for reserved in RESERVED_ARGS)


def _data_lines(config: MasterConfig) -> Iterator[str]:
    data, grpo = config.data, config.grpo
    if "{problem}" not in data.prompt:
        yield refusal("data.prompt", data.prompt, "must contain {problem}")
    has_images = isinstance(data, PicturesDataConfig) or (
        isinstance(data, ResponseDataConfig) and data.image_key is not None
    )
    if has_images and config.policy.tokenizer.name is not None:
        only = "only null with pictures: trainer and engine read them by the model's own processor"
        yield refusal("policy.tokenizer.name", config.policy.tokenizer.name, only)
    if isinstance(data, ResponseDataConfig):
        if grpo.validates and data.val_data_path is None:
            yield refusal("data.val_data_path", None, f"validation needs a file, or {NO_VALIDATION}")
        return
    if data.num_train < grpo.num_prompts_per_step:
        yield refusal(
            "data.num_train",
            data.num_train,
            f"must be at least grpo.num_prompts_per_step = {grpo.num_prompts_per_step}",
        )
    if grpo.validates and data.num_validation == 0:
        yield refusal("data.num_validation", 0, f"validation needs at least 1, or {NO_VALIDATION}")
    if isinstance(data, ArithmeticDataConfig):
        for unit, low, high in (
            ("terms", data.min_terms, data.max_terms),
            ("digits", data.min_digits, data.max_digits),
        ):
            if low > high:
                yield refusal(f"data.min_{unit}", low, f"must be at most data.max_{unit} = {high}")
        if len(set(data.operators)) < len(data.operators):
            yield refusal("data.operators", data.operators, "each may stand there once")
