"""The strict schema of a run: every key, its type, its range, its meaning.

Imports nothing heavy, so that a wrong key fails within a second. What is a valid value but not a supported
combination is refused by `support.py`, whose table knows the nearest supported setting.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
TimeoutS = Annotated[float, Field(ge=1.0, le=604_800.0)]
"""A second to a week."""
NonEmptyStr = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class AdamWKwargs(Section):
    lr: Annotated[float, Field(gt=0.0, le=1.0)] = 5e-6
    """Base learning rate; the scheduler multiplies it."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.01
    """Decoupled weight decay."""
    betas: Annotated[list[Annotated[float, Field(ge=0.0, lt=1.0)]], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """Decay of the first and the second moment."""
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    """Added to the denominator."""


class OptimizerConfig(Section):
    name: Literal["torch.optim.AdamW"] = "torch.optim.AdamW"
    """The optimizer."""
    kwargs: AdamWKwargs = AdamWKwargs()


class LinearLRKwargs(Section):
    start_factor: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """Of `lr`, at the first step."""
    end_factor: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Of `lr`, from `total_iters` on."""
    total_iters: PositiveInt = 10
    """Optimizer steps until `end_factor`."""


class SchedulerConfig(Section):
    """The learning rate over the first steps: warm-up, or decay."""

    name: Literal["torch.optim.lr_scheduler.LinearLR"] = "torch.optim.lr_scheduler.LinearLR"
    """Linear in the optimizer steps."""
    kwargs: LinearLRKwargs = LinearLRKwargs()


class TokenizerConfig(Section):
    name: str | None = None
    """Hub id or folder; null: the model's own."""
    chat_template: str | None = "default"
    """`default`: the tokenizer's own; null: raw text, no template; anything else: a Jinja template."""


class LoRAConfig(Section):
    """Low-rank adapters (peft) on linear layers; all other parameters are frozen."""

    enabled: bool = False
    """Train adapters alone; engines and exports get the weights with the adapters merged into them."""
    target_modules: list[NonEmptyStr] = []
    """Names of linear layers, or their endings, with wildcards: `q_proj`, `*_proj`, `*.layers.0.*`. Empty: `match_all_linear`."""
    exclude_modules: list[NonEmptyStr] = []
    """Patterns of the same kind: layers to leave out."""
    match_all_linear: bool = True
    """Every linear layer of the transformer blocks; to be false where `target_modules` says which."""
    dim: PositiveInt = 8
    """Rank of the adapters."""
    alpha: PositiveInt = 32
    """A weight W becomes W + alpha / dim * B A."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """0 only: the model is in eval mode, so that the log-probs that the loss compares come from one function."""
    dropout_position: Literal["pre", "post"] = "post"
    """Without effect, since `dropout` is 0."""
    lora_a_init: Literal["xavier", "uniform", "gaussian"] = Field(default="xavier", alias="lora_A_init")
    """Of A; B starts at 0. `xavier`: Xavier normal; `uniform`: Kaiming uniform, as peft has it by default; `gaussian`: of
    standard deviation 1 / dim."""
    use_triton: bool = False
    """False only: peft has no Triton kernels."""

    @property
    def if_enabled(self) -> "LoRAConfig | None":
        """None: no adapters."""
        return self if self.enabled else None


class DTensorConfig(Section):
    enabled: bool = True
    """The FSDP2/DTensor policy."""
    v2: bool = Field(default=True, alias="_v2")
    """The second worker; the first is not supported."""
    tensor_parallel_size: PositiveInt = 1
    """Ranks that share each matrix, by the plan of transformers for the model; divides the trainer ranks."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share each sequence."""
    sequence_parallel: bool = False
    """Shard activations along the sequence; goes with tensor parallelism."""
    cpu_offload: bool = False
    """Keep the shards in host memory between uses; on CUDA alone."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass instead of keeping its activations."""
    torch_compile: bool = False
    """Compile each block of the policy, for any length; needs a C++ compiler on CPU, a C compiler on CUDA."""
    lora_cfg: LoRAConfig = LoRAConfig()


class MegatronConfig(Section):
    enabled: bool = False
    """The Megatron policy; not supported."""


class GenerationResources(Section):
    num_nodes: PositiveInt | None = None
    """Nodes taken for the engines; null: 1."""
    gpus_per_node: PositiveInt | None = None
    """Slots taken from `cluster.gpus_per_node` for the engines."""


class ColocatedConfig(Section):
    enabled: bool = False
    """Engines on the trainer's devices; not supported."""
    resources: GenerationResources = GenerationResources()


class SGLangServerConfig(Section):
    weight_transfer_mode: Literal["broadcast", "ipc"] = "broadcast"
    """How the weights reach the engines."""
    weight_update_backend: Literal["nccl", "gloo"] | None = None
    """Backend of the weight-update group; null: nccl on CUDA, gloo on CPU."""
    pause_generation_mode: Literal["retract", "abort", "in_place"] = "retract"
    """What a refit does to running requests: start them again afterwards, or end them with what they have."""
    num_gpus: PositiveInt | None = None
    """Slots of all engines together; null: all inference slots."""
    num_gpus_per_engine: PositiveInt = 1
    """Slots of one engine: its tensor-parallel size."""
    pp_size: PositiveInt = 1
    """Pipeline-parallel size of an engine."""
    sglang_server_concurrency: PositiveInt = 64
    """Requests in flight per engine."""
    startup_timeout_s: TimeoutS = 600.0
    """Until a server must answer."""
    request_timeout_s: TimeoutS = 600.0
    """One generation request."""
    refit_timeout_s: TimeoutS = 1800.0
    """One whole refit, shared by every wait in it."""
    needs_offload: bool = False
    """Of colocated engines; not supported."""
    cpu_weight_backup: bool = False
    """Of colocated engines; not supported."""
    random_seed: Annotated[int, Field(ge=0, le=2**31 - 1 - 1024)] = 42
    """Of the engines' samplers; engine i adds i."""
    extra_args: list[str] = []
    """Passed to `sglang.launch_server` as they are, after ours; none of what other keys set."""


class SGLangRouterConfig(Section):
    """The router in front of several engines; with one engine there is none."""

    policy: Literal["manual", "cache_aware", "consistent_hashing", "round_robin", "random", "power_of_two"] = "manual"
    """Which engine a request goes to. `manual`: all samples of a prompt to one, the least loaded when the first comes;
    `consistent_hashing`: all samples of a prompt to one, by hash; `cache_aware`: where a like prefix is cached."""
    cache_threshold: Fraction = 0.3
    """Of `cache_aware`: least part of a prompt that an engine must have seen to be chosen for its cache."""
    balance_abs_threshold: Annotated[int, Field(ge=0)] = 64
    """Of `cache_aware`: the load is out of balance when two engines differ by more requests than this, and ..."""
    balance_rel_threshold: Annotated[float, Field(ge=1.0)] = 1.5
    """... by more than this factor."""


class SGLangFaultToleranceConfig(Section):
    use_fault_tolerance: bool = False
    """Replace an engine that dies, hangs, or may hold a part of new weights, and go on; false: the run ends with an error."""
    health_check_interval_s: TimeoutS = 10.0
    """Between two checks of an engine. None is made while a refit owns the engines."""
    health_check_timeout_s: TimeoutS = 30.0
    """Until one check must answer."""
    health_check_first_wait_s: Annotated[float, Field(ge=0.0, le=604_800.0)] = 30.0
    """Before the first check of the run: a first answer may have to compile."""
    health_check_max_failures: PositiveInt = 3
    """An engine that fails so many checks in a row is taken for dead."""
    max_replacements: Annotated[int, Field(ge=0)] = 10
    """Engines that may be replaced in the whole run; the next failure ends it."""
    max_request_retries: Annotated[int, Field(ge=0)] = 3
    """Times that one request is sent again after its engine has failed."""


class SGLangQuantizationConfig(Section):
    scheme: str = "bf16"
    """Of the engines; `bf16`: weights as the policy sends them."""


class SGLangConfig(Section):
    sglang_server_config: SGLangServerConfig = SGLangServerConfig()
    sglang_router_config: SGLangRouterConfig = SGLangRouterConfig()
    sglang_fault_tolerance_config: SGLangFaultToleranceConfig = SGLangFaultToleranceConfig()
    quantization: SGLangQuantizationConfig = SGLangQuantizationConfig()


class GenerationConfig(Section):
    backend: Literal["sglang", "vllm", "megatron"] = "sglang"
    """Generation backend."""
    max_new_tokens: PositiveInt
    """Of one response."""
    temperature: Annotated[float, Field(ge=0.01, le=100.0)] = 1.0
    """Of sampling and of the log-probs that are trained on; validation is greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling; 1 only."""
    top_k: PositiveInt | None = None
    """Sampling among the k likeliest; null only."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    """Tokens that end a response, beside the tokenizer's eos."""
    stop_strings: list[NonEmptyStr] | None = None
    """Texts that end a response."""
    colocated: ColocatedConfig = ColocatedConfig()
    sglang_cfg: SGLangConfig = SGLangConfig()


class PolicyConfig(Section):
    model_name: NonEmptyStr
    """Hub id, local folder, `smollm2-135m-instruct` (from its package), `tiny-random-qwen3` or `tiny-random-qwen3-vl`."""
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
    """Prompt and response, in tokens."""
    max_grad_norm: Annotated[float, Field(gt=0.0)] | None = 1.0
    """Gradients are clipped to this norm over all ranks; null: not clipped."""
    freeze_vision_tower: bool = False
    """Do not train what a vision-language model makes picture features with; refused for a text model."""
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig | None = None
    """Warm-up or decay of the learning rate; null: constant."""
    dtensor_cfg: DTensorConfig = DTensorConfig()
    megatron_cfg: MegatronConfig = MegatronConfig()
    refit_buffer_size_gb: Annotated[float, Field(gt=0.0, le=1024.0)] | None = None
    """Bucket size of the refit; null: computed once from what trainer and engines have free, at most 2 GiB."""
    generation: GenerationConfig


class GRPOConfig(Section):
    num_prompts_per_step: PositiveInt
    """Groups per step."""
    num_generations_per_prompt: Annotated[int, Field(ge=2)]
    """Samples per group."""
    max_num_steps: PositiveInt
    """Steps of the run."""
    max_num_epochs: PositiveInt = 1_000_000
    """Passes over the training prompts."""
    val_period: Annotated[int, Field(ge=0)] = 10
    """Steps between validations; 0: none."""
    val_at_start: bool = True
    """Validate before the first step."""
    val_at_end: bool = True
    """Validate after the last step."""
    max_val_samples: PositiveInt = 200
    """At most so many, from the start of the validation set."""
    normalize_rewards: bool = True
    """Divide the advantage by the group's standard deviation."""
    use_leave_one_out_baseline: bool = True
    """Compare a sample with the mean of its group's others; false: with the mean of all."""
    seed: Seed = 42
    """Of the order of prompts and of the trainer."""

    @property
    def validates(self) -> bool:
        """Whether the run validates at any time."""
        return self.val_period > 0 or self.val_at_start or self.val_at_end


class LossConfig(Section):
    reference_policy_kl_penalty: Annotated[float, Field(ge=0.0)] = 0.01
    """Weight of the KL term; 0: no reference policy is held."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence."""
    ratio_clip_min: Fraction = 0.2
    """The ratio is clipped from below at 1 - this."""
    ratio_clip_max: Annotated[float, Field(ge=0.0)] = 0.2
    """And from above at 1 + this; another value than `ratio_clip_min` makes the clip asymmetric."""
    ratio_clip_c: Annotated[float, Field(gt=1.0)] | None = None
    """Dual clip for negative advantages; null: off."""
    token_level_loss: bool = True
    """Mean over the batch's tokens; false: mean over samples of each sample's token mean."""
    use_importance_sampling_correction: bool = True
    """Weight each token by trainer probability / engine probability."""
    truncated_importance_sampling_ratio: Annotated[float, Field(gt=0.0)] | None = 2.0
    """Upper bound of that weight; null: none."""


class RefitConfig(Section):
    verify: Literal["off", "engines", "full"] = "engines"
    """Proof of each refit by the engines' checksums. `engines`: all engines agree; `full`: also with the trainer's exported
    folder loaded from disk; `off`: neither. The first refit is always compared with what the engines loaded.
    """
    engine_constants: list[NonEmptyStr] = []
    """Endings of the names of engine tensors that no weight reaches, because the engine makes them of its config."""

    @field_validator("verify", mode="before")
    @classmethod
    def _off_is_false_in_yaml(cls, value: object) -> object:
        return "off" if value is False else value


class ArithmeticDataConfig(Section):
    dataset_name: Literal["arithmetic"]
    """Generated from a seed; training and validation problems differ."""
    num_train: PositiveInt = 4096
    """Training problems."""
    num_validation: Annotated[int, Field(ge=0)] = 200
    """Validation problems."""
    min_terms: Annotated[int, Field(ge=2, le=3)] = 2
    """Least number of terms."""
    max_terms: Annotated[int, Field(ge=2, le=3)] = 2
    """Greatest number of terms."""
    min_digits: Annotated[int, Field(ge=1, le=6)] = 1
    """Least number of digits of an operand."""
    max_digits: Annotated[int, Field(ge=1, le=6)] = 2
    """Greatest number of digits of an operand."""
    larger_first: bool = True
    """Operands in falling order."""
    min_result: int | None = 0
    """Keep problems whose result is at least this; null: all."""
    operators: Annotated[list[Literal["+", "-", "*"]], Field(min_length=1)] = ["+", "-"]
    """What joins the terms."""
    seed: Seed = 42
    """Of the problems."""
    shuffle: bool = True
    """A new order of the training prompts in each epoch."""
    prompt: str = "State the final answer to the following arithmetic problem: {problem} ="
    """The user's message; `{problem}` stands for the problem."""


class ReasoningGymDataConfig(Section):
    dataset_name: Literal["reasoning_gym"]
    """A task of the package reasoning-gym (`uv run --extra reasoning-gym ...`)."""
    task: str
    """Name of a task of the package."""
    task_kwargs: dict[str, bool | int | float | str] = {}
    """Its settings."""
    num_train: PositiveInt = 4096
    """Training problems."""
    num_validation: Annotated[int, Field(ge=0)] = 200
    """Validation problems."""
    seed: Seed = 42
    """Of the problems."""
    shuffle: bool = True
    """A new order of the training prompts in each epoch."""
    prompt: str = "{problem}"
    """The user's message; `{problem}` stands for the problem."""


class ResponseDataConfig(Section):
    dataset_name: Literal["ResponseDataset"]
    """JSON lines with a prompt and a reference answer."""
    train_data_path: str
    """JSON lines to train on."""
    val_data_path: str | None = None
    """JSON lines to validate on; null: none."""
    input_key: str = "input"
    """Key of the prompt."""
    output_key: str = "output"
    """Key of the reference answer."""
    image_key: str | None = None
    """Key of a picture's path, from the file's folder, or of a list of paths; needs a vision-language model. A line
    without the key, or with null, has no picture; one line at least has the key. Null: no pictures."""
    shuffle: bool = True
    """A new order of the training prompts in each epoch."""
    prompt: str = "{problem}"
    """The user's message; `{problem}` stands for the problem."""


class PicturesDataConfig(Section):
    dataset_name: Literal["pictures"]
    """Pictures drawn from a seed, for a vision-language model; training and validation pictures differ."""
    tasks: Annotated[list[Literal["count_shapes", "read_digit"]], Field(min_length=1)] = ["count_shapes", "read_digit"]
    """`count_shapes`: how many circles or squares there are; `read_digit`: which digit it is."""
    image_size: Annotated[int, Field(ge=28, le=1024)] = 56
    """Pixels of each edge."""
    max_shapes: Annotated[int, Field(ge=1, le=9)] = 5
    """Most shapes to count."""
    num_train: PositiveInt = 1024
    """Training problems."""
    num_validation: Annotated[int, Field(ge=0)] = 64
    """Validation problems."""
    seed: Seed = 42
    """Of the problems."""
    shuffle: bool = True
    """A new order of the training prompts in each epoch."""
    prompt: str = "{problem} Answer with a number."
    """The user's message beside the picture; `{problem}` stands for the question."""


DataConfig = Annotated[
    ArithmeticDataConfig | ReasoningGymDataConfig | ResponseDataConfig | PicturesDataConfig,
    Field(discriminator="dataset_name"),
]


class MathEnvConfig(Section):
    verifier: Literal["last_integer", "math_verify"] = "last_integer"
    """`last_integer`: the last integer of the answer equals the reference; `math_verify`: by that package."""


class EnvConfig(Section):
    math: MathEnvConfig = MathEnvConfig()


class LoggerConfig(Section):
    log_dir: NonEmptyStr = "logs/grpo"
    """A new numbered folder `exp_NNN` is made in it for each run."""
    tensorboard_enabled: bool = True
    """Write `tensorboard/` into the run folder."""
    num_val_samples_to_print: Annotated[int, Field(ge=0)] = 20
    """Validation samples kept in `samples.jsonl` each time."""


class CheckpointingConfig(Section):
    enabled: bool = True
    """Export the trained model at the end, as a Hugging Face folder."""
    checkpoint_dir: str | None = None
    """Null: `hf_model` in the run's log folder."""
    lora_export: Literal["merged", "adapter", "both"] = "both"
    """Of a run with LoRA: the whole model with the adapters merged into it, the adapters alone as a peft folder, which is
    named `..._adapter` and lies beside, or both."""


class ClusterConfig(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: cuda where there is one. On cpu a slot stands for a GPU in every count."""
    num_nodes: Annotated[int, Field(ge=1, le=65_536)] = 1
    """Nodes of the Ray cluster."""
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)]
    """Slots of one node, for trainer ranks and engines together."""
    share_gpus: bool = False
    """Every slot has a trainer rank, and the engines stand on the same slots: to try a run on one GPU, not for speed."""


class MasterConfig(Section):
    policy: PolicyConfig
    grpo: GRPOConfig
    loss_fn: LossConfig = LossConfig()
    refit: RefitConfig = RefitConfig()
    data: DataConfig
    env: EnvConfig = EnvConfig()
    logger: LoggerConfig = LoggerConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    cluster: ClusterConfig
