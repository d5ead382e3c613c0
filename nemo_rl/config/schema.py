"""The strict schema of a run: every key, its type, its range, its meaning.

Imports nothing heavy, so that a wrong key fails within a second. What is a valid value but not a supported
combination is refused by `support.py`, whose table knows the nearest supported setting.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, populate_by_name=True, allow_inf_nan=False
    )


class AdamWKwargs(Section):
    lr: Annotated[float, Field(gt=0.0, le=1.0)] = 5e-6
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.01
    betas: Annotated[list[Annotated[float, Field(ge=0.0, lt=1.0)]], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    eps: Annotated[float, Field(gt=0.0)] = 1e-8


class OptimizerConfig(Section):
    name: Literal["torch.optim.AdamW"] = "torch.optim.AdamW"
    kwargs: AdamWKwargs = AdamWKwargs()


class LinearLRKwargs(Section):
    start_factor: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    end_factor: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    total_iters: PositiveInt = 10
    """Optimizer steps until `end_factor`."""


class SchedulerConfig(Section):
    """Warm-up of the learning rate."""

    name: Literal["torch.optim.lr_scheduler.LinearLR"] = "torch.optim.lr_scheduler.LinearLR"
    kwargs: LinearLRKwargs = LinearLRKwargs()


class TokenizerConfig(Section):
    name: str | None = None
    """Hub id or folder; null: the model's own."""
    chat_template: str | None = "default"
    """`default`: the tokenizer's own; null: raw text, no template; anything else: a Jinja template."""


class DTensorConfig(Section):
    enabled: bool = True
    v2: bool = Field(default=True, alias="_v2")
    tensor_parallel_size: PositiveInt = 1
    context_parallel_size: PositiveInt = 1
    sequence_parallel: bool = False
    cpu_offload: bool = False
    activation_checkpointing: bool = False


class MegatronConfig(Section):
    enabled: bool = False


class GenerationResources(Section):
    num_nodes: PositiveInt | None = None
    gpus_per_node: PositiveInt | None = None
    """Slots taken from `cluster.gpus_per_node` for the engines."""


class ColocatedConfig(Section):
    enabled: bool = False
    resources: GenerationResources = GenerationResources()


class SGLangServerConfig(Section):
    weight_transfer_mode: Literal["broadcast", "ipc"] = "broadcast"
    weight_update_backend: Literal["nccl", "gloo"] | None = None
    """Backend of the weight-update group; null: nccl on CUDA, gloo on CPU."""
    pause_generation_mode: Literal["retract", "abort", "in_place"] = "retract"
    num_gpus: PositiveInt | None = None
    """Slots of all engines together; null: all inference slots."""
    num_gpus_per_engine: PositiveInt = 1
    pp_size: PositiveInt = 1
    sglang_server_concurrency: PositiveInt = 64
    """Requests in flight per engine."""
    startup_timeout_s: Annotated[float, Field(gt=0.0)] = 600.0
    request_timeout_s: Annotated[float, Field(gt=0.0)] = 600.0
    """One generation request."""
    refit_timeout_s: Annotated[float, Field(gt=0.0)] = 1800.0
    """One whole refit, shared by every wait in it."""
    needs_offload: bool = False
    cpu_weight_backup: bool = False
    random_seed: int = 42
    extra_args: list[str] = []
    """Passed to `sglang.launch_server` as they are, after ours."""


class SGLangQuantizationConfig(Section):
    scheme: str = "bf16"


class SGLangConfig(Section):
    sglang_server_config: SGLangServerConfig = SGLangServerConfig()
    quantization: SGLangQuantizationConfig = SGLangQuantizationConfig()


class GenerationConfig(Section):
    backend: Literal["sglang", "vllm", "megatron"] = "sglang"
    max_new_tokens: PositiveInt
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: PositiveInt | None = None
    stop_token_ids: list[int] | None = None
    stop_strings: list[str] | None = None
    colocated: ColocatedConfig = ColocatedConfig()
    sglang_cfg: SGLangConfig = SGLangConfig()


class PolicyConfig(Section):
    model_name: str
    """Hub id, local folder, `smollm2-135m-instruct` (from its package) or `tiny-random-qwen3`."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute and wire dtype; master weights, gradients and optimizer state are float32."""
    train_global_batch_size: PositiveInt
    """Samples per optimizer step, over all ranks."""
    train_micro_batch_size: PositiveInt
    """Samples per forward pass of one rank."""
    logprob_batch_size: PositiveInt | None = None
    """Samples per forward pass of one rank without gradient; null: `train_micro_batch_size`."""
    max_total_sequence_length: PositiveInt
    max_grad_norm: Annotated[float, Field(gt=0.0)] | None = 1.0
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig | None = None
    dtensor_cfg: DTensorConfig = DTensorConfig()
    megatron_cfg: MegatronConfig = MegatronConfig()
    refit_buffer_size_gb: Annotated[float, Field(gt=0.0)] | None = None
    """Bucket size of the refit; null: computed once on the driver from free memory."""
    generation: GenerationConfig


class GRPOConfig(Section):
    num_prompts_per_step: PositiveInt
    num_generations_per_prompt: Annotated[int, Field(ge=2)]
    max_num_steps: PositiveInt
    max_num_epochs: PositiveInt = 1_000_000
    val_period: Annotated[int, Field(ge=0)] = 10
    """Steps between validations; 0: none."""
    val_at_start: bool = True
    val_at_end: bool = True
    max_val_samples: PositiveInt = 200
    normalize_rewards: bool = True
    """Divide the advantage by the group's standard deviation."""
    use_leave_one_out_baseline: bool = True
    seed: int = 42


class LossConfig(Section):
    reference_policy_kl_penalty: Annotated[float, Field(ge=0.0)] = 0.01
    """Weight of the KL term; 0: no reference policy is held."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    ratio_clip_min: Fraction = 0.2
    ratio_clip_max: Annotated[float, Field(ge=0.0)] = 0.2
    """Differs from `ratio_clip_min`: asymmetric clip."""
    ratio_clip_c: Annotated[float, Field(gt=1.0)] | None = None
    """Dual clip for negative advantages; null: off."""
    token_level_loss: bool = True
    """Mean over the batch's tokens; false: mean over samples of each sample's token mean."""
    use_importance_sampling_correction: bool = True
    """Weight each token by trainer probability / engine probability."""
    truncated_importance_sampling_ratio: Annotated[float, Field(gt=0.0)] | None = 2.0
    """Upper bound of that weight; null: none."""


class ArithmeticDataConfig(Section):
    dataset_name: Literal["arithmetic"]
    num_train: PositiveInt = 4096
    num_validation: Annotated[int, Field(ge=0)] = 200
    min_terms: Annotated[int, Field(ge=2, le=3)] = 2
    max_terms: Annotated[int, Field(ge=2, le=3)] = 2
    max_operand: PositiveInt = 99
    operators: Annotated[list[Literal["+", "-", "*"]], Field(min_length=1)] = ["+", "-"]
    seed: int = 42
    shuffle: bool = True
    prompt: str = "State the final answer to the following arithmetic problem: {problem} ="


class ReasoningGymDataConfig(Section):
    dataset_name: Literal["reasoning_gym"]
    task: str
    """Name of a task of the package."""
    task_kwargs: dict[str, bool | int | float | str] = {}
    num_train: PositiveInt = 4096
    num_validation: Annotated[int, Field(ge=0)] = 200
    seed: int = 42
    shuffle: bool = True
    prompt: str = "{problem}"


class ResponseDataConfig(Section):
    """JSON lines with a prompt and a reference answer."""

    dataset_name: Literal["ResponseDataset"]
    train_data_path: str
    val_data_path: str | None = None
    input_key: str = "input"
    output_key: str = "output"
    seed: int = 42
    shuffle: bool = True
    prompt: str = "{problem}"


DataConfig = Annotated[
    ArithmeticDataConfig | ReasoningGymDataConfig | ResponseDataConfig, Field(discriminator="dataset_name")
]


class MathEnvConfig(Section):
    verifier: Literal["last_integer", "math_verify"] = "last_integer"
    """`last_integer`: the last integer of the answer equals the reference; `math_verify`: by that package."""


class EnvConfig(Section):
    math: MathEnvConfig = MathEnvConfig()


class LoggerConfig(Section):
    log_dir: str = "logs/grpo"
    """A new numbered folder `exp_NNN` is made in it for each run."""
    tensorboard_enabled: bool = True
    num_val_samples_to_print: Annotated[int, Field(ge=0)] = 3


class CheckpointingConfig(Section):
    enabled: bool = True
    """Export the trained model at the end, as a Hugging Face folder."""
    checkpoint_dir: str | None = None
    """Null: `hf_model` in the run's log folder."""


class ClusterConfig(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: cuda where there is one. On cpu a slot stands for a GPU in every count."""
    num_nodes: PositiveInt = 1
    gpus_per_node: PositiveInt


class MasterConfig(Section):
    policy: PolicyConfig
    grpo: GRPOConfig
    loss_fn: LossConfig = LossConfig()
    data: DataConfig
    env: EnvConfig = EnvConfig()
    logger: LoggerConfig = LoggerConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    cluster: ClusterConfig
