"""Configs that are refused: overrides of a shipped config, the key that the refusal names, and what it says.

One list for every kind of fault: a key that does not exist, a value of the wrong type, out of range or not supported,
keys that contradict each other, more slots than there are, an engine argument that the program rules out.
"""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
CPU_CONFIG = ROOT / "examples/configs/grpo_sglang_broadcast_cpu.yaml"
GENERATION = "policy.generation"
SGLANG = f"{GENERATION}.sglang_cfg"
SERVER = f"{SGLANG}.sglang_server_config"
ROUTER = f"{SGLANG}.sglang_router_config"
TOLERANCE = f"{SGLANG}.sglang_fault_tolerance_config"
QUANTIZATION = f"{SGLANG}.quantization"
RESOURCES = f"{GENERATION}.colocated.resources"
DTENSOR = "policy.dtensor_cfg"
LORA = f"{DTENSOR}.lora_cfg"
OPTIMIZER = "policy.optimizer.kwargs"
RULED_OUT = "not allowed: the program sets it from other keys, or rules it out"
ROUTER_POLICIES = "'manual', 'cache_aware', 'consistent_hashing', 'round_robin', 'random' or 'power_of_two'"


@dataclass(frozen=True)
class BadConfig:
    overrides: tuple[str, ...]
    key: str
    """Which the refusal begins with."""
    says: str
    """The value, where there is one, and what is allowed."""


def bad(key: str, value: str, says: str) -> BadConfig:
    """One override, refused under its own key."""
    return BadConfig((f"{key}={value}",), key, says)


def together(overrides: list[str], key: str, says: str) -> BadConfig:
    return BadConfig(tuple(overrides), key, says)


def with_lora(key: str, value: str, says: str) -> BadConfig:
    return BadConfig((f"{LORA}.enabled=true", f"{key}={value}"), key, says)


UNKNOWN_KEYS = [
    bad("policy.precison", "bfloat16", "got 'bfloat16'; unknown key; did you mean 'precision'?"),
    bad(f"{SERVER}.kv_cache_dtype", "fp8_e5m2", "got 'fp8_e5m2'; unknown key; allowed here: "),
    bad(f"{QUANTIZATION}.schema", "fp8", "got 'fp8'; unknown key; did you mean 'scheme'?"),
    bad(f"{ROUTER}.polcy", "random", "got 'random'; unknown key; did you mean 'policy'?"),
    bad(f"{TOLERANCE}.use_fault_tolerence", "true", "got true; unknown key; did you mean 'use_fault_tolerance'?"),
    bad(f"{LORA}.rank", "8", "got 8; unknown key; did you mean 'dim'?"),
    bad(f"{LORA}.r", "8", "got 8; unknown key; did you mean 'dim'?"),
    bad(f"{LORA}.lora_alpha", "8", "got 8; unknown key; did you mean 'alpha'?"),
    bad("policy.rank", "8", "got 8; unknown key; allowed here: dtensor_cfg, "),
    bad("data.num_trian", "7", "got 7; unknown key; did you mean 'num_train'?"),
]

MISSING_KEYS = [
    together(["~policy.model_name"], "policy.model_name", "missing; every run must set it"),
    together(["~cluster.gpus_per_node"], "cluster.gpus_per_node", "missing; every run must set it"),
    together(["data=${policy}"], "data.dataset_name", "missing; every run must set it"),
    together(["data.dataset_name=reasoning_gym"], "data.task", "missing; every run must set it"),
]

TYPES = [
    bad("policy.model_name", "null", "got null; allowed: a valid string"),
    bad("policy.train_micro_batch_size", "big", "got 'big'; allowed: a valid integer"),
    bad("policy.train_micro_batch_size", "'8'", "got '8'; allowed: a valid integer"),
    bad("policy.freeze_vision_tower", "1", "got 1; allowed: true, false"),
    bad(f"{DTENSOR}.enabled", "1", "got 1; allowed: true, false"),
    bad(f"{DTENSOR}.torch_compile", "1", "got 1; allowed: true, false"),
    bad(f"{DTENSOR}._v2", "0", "got 0; allowed: true, false"),
    bad(f"{TOLERANCE}.use_fault_tolerance", "1", "got 1; allowed: true, false"),
    bad(f"{GENERATION}.top_p", "abc", "got 'abc'; allowed: a valid number"),
    bad(f"{GENERATION}.stop_token_ids", "5", "got 5; allowed: a list of integers"),
    bad(f"{SERVER}.extra_args", "--foo", "got '--foo'; allowed: a list of strings"),
    bad("refit.engine_constants", "foo", "got 'foo'; allowed: a list of strings"),
    bad("refit", "full", "got 'full'; allowed: a section with the keys verify, engine_constants"),
    bad(f"{LORA}.target_modules", "q_proj", "got 'q_proj'; allowed: a list of strings"),
    bad("policy.scheduler", "5", "got 5; allowed: a section with the keys name, kwargs"),
    bad(QUANTIZATION, "fp8", "got 'fp8'; allowed: a section with the keys scheme"),
    bad("data", "foo", "got 'foo'; allowed: a section with the key dataset_name and those of its kind"),
]

RANGES = [
    bad("policy.precision", "fp8", "got 'fp8'; allowed: 'bfloat16' or 'float32'"),
    bad("policy.optimizer.name", "sgd", "got 'sgd'; allowed: 'torch.optim.AdamW'"),
    bad(f"{OPTIMIZER}.lr", "-1.0", "got -1.0; allowed: greater than 0"),
    bad(f"{OPTIMIZER}.lr", "nan", "got nan; allowed: a finite number"),
    bad(f"{OPTIMIZER}.betas", "[0.9]", "got [0.9]; allowed: at least 2 items"),
    bad("policy.max_grad_norm", "0.0", "got 0.0; allowed: greater than 0"),
    bad("policy.refit_buffer_size_gb", "0.0", "got 0.0; allowed: greater than 0"),
    bad(f"{GENERATION}.max_new_tokens", "0", "got 0; allowed: greater than or equal to 1"),
    bad(f"{GENERATION}.temperature", "0.0", "got 0.0; allowed: greater than or equal to 0.01"),
    bad(f"{SERVER}.num_gpus_per_engine", "0", "got 0; allowed: greater than or equal to 1"),
    bad(f"{SERVER}.refit_timeout_s", "0.5", "got 0.5; allowed: greater than or equal to 1"),
    bad(f"{SERVER}.weight_update_backend", "mpi", "got 'mpi'; allowed: 'nccl' or 'gloo'"),
    bad(f"{ROUTER}.policy", "bucket", f"got 'bucket'; allowed: {ROUTER_POLICIES}"),
    bad(f"{ROUTER}.cache_threshold", "1.1", "got 1.1; allowed: less than or equal to 1"),
    bad(f"{ROUTER}.balance_abs_threshold", "-1", "got -1; allowed: greater than or equal to 0"),
    bad(f"{ROUTER}.balance_rel_threshold", "0.9", "got 0.9; allowed: greater than or equal to 1"),
    bad(f"{TOLERANCE}.health_check_interval_s", "0.5", "got 0.5; allowed: greater than or equal to 1"),
    bad(f"{TOLERANCE}.health_check_timeout_s", "inf", "got inf; allowed: "),
    bad(f"{TOLERANCE}.health_check_first_wait_s", "-1.0", "got -1.0; allowed: greater than or equal to 0"),
    bad(f"{TOLERANCE}.health_check_max_failures", "0", "got 0; allowed: greater than or equal to 1"),
    bad(f"{TOLERANCE}.max_replacements", "-1", "got -1; allowed: greater than or equal to 0"),
    bad(f"{TOLERANCE}.max_request_retries", "-1", "got -1; allowed: greater than or equal to 0"),
    bad(f"{LORA}.dim", "0", "got 0; allowed: greater than or equal to 1"),
    bad(f"{LORA}.lora_A_init", "pissa", "got 'pissa'; allowed: 'xavier', 'uniform' or 'gaussian'"),
    bad("grpo.num_generations_per_prompt", "1", "got 1; allowed: greater than or equal to 2"),
    bad("loss_fn.reference_policy_kl_type", "k4", "got 'k4'; allowed: 'k1', 'k2' or 'k3'"),
    bad("loss_fn.ratio_clip_c", "1.0", "got 1.0; allowed: greater than 1"),
    bad("refit.verify", "some", "got 'some'; allowed: 'off', 'engines' or 'full'"),
    bad("env.math.verifier", "none", "got 'none'; allowed: 'last_integer' or 'math_verify'"),
    bad("data.dataset_name", "gsm8k", "got 'gsm8k'; allowed: 'arithmetic', 'reasoning_gym', 'ResponseDataset'"),
    bad("data.operators", "[]", "got []; allowed: at least 1 item"),
    together(
        ["data.dataset_name=pictures", "data.tasks=[count_cats]"],
        "data.tasks.0",
        "got 'count_cats'; allowed: 'count_shapes' or 'read_digit'",
    ),
    together(
        ["data.dataset_name=pictures", "data.image_size=16"],
        "data.image_size",
        "got 16; allowed: greater than or equal",
    ),
    bad("logger.log_dir", "''", "got ''; allowed: at least 1 character"),
    bad("cluster.device", "tpu", "got 'tpu'; allowed: 'auto', 'cpu' or 'cuda'"),
]

UNSUPPORTED = [
    bad(f"{GENERATION}.backend", "vllm", f"got 'vllm'; not supported (generation runs on SGLang); set {GENERATION}"),
    bad(f"{GENERATION}.colocated.enabled", "true", "got true; not supported (broadcast needs the engines on their own"),
    bad(
        f"{SERVER}.weight_transfer_mode", "ipc", "got 'ipc'; not supported (ipc needs trainer and engine on one device"
    ),
    bad(f"{SERVER}.pause_generation_mode", "in_place", "got 'in_place'; not supported (in_place would keep KV entries"),
    bad(f"{SERVER}.pp_size", "2", "got 2; not supported (the weight-update group counts tensor-parallel"),
    bad(f"{QUANTIZATION}.scheme", "fp8", "got 'fp8'; not supported (the policy's weights are sent as they are); set "),
    bad(
        f"{QUANTIZATION}.scheme", "bf61", "got 'bf61'; not supported (the policy's weights are sent as they are); set "
    ),
    bad(f"{GENERATION}.top_p", "0.9", "got 0.9; not supported (the trainer's log-probs are those of the whole"),
    bad(f"{GENERATION}.top_k", "5", "got 5; not supported (the trainer's log-probs are those of the whole vocabulary"),
    with_lora(f"{DTENSOR}.tensor_parallel_size", "2", "got 2; not supported ("),
    with_lora(f"{LORA}.dropout", "0.1", "got 0.1; not supported (the model is in eval mode also for training"),
    with_lora("policy.freeze_vision_tower", "true", "got true; not supported (adapters train alone; "),
    with_lora(f"{LORA}.use_triton", "true", "got true; not supported (peft has no Triton kernels); set "),
    bad(f"{DTENSOR}.context_parallel_size", "2", "got 2; not supported (the policy is sharded by FSDP2 and tensor"),
    bad(f"{DTENSOR}.sequence_parallel", "true", "got true; not supported (activations are whole on every"),
    bad("policy.megatron_cfg.enabled", "true", "got true; not supported (the Megatron policy is not part of this"),
    together([f"{DTENSOR}._v2=false"], f"{DTENSOR}._v2", "got false; not supported (the DTensor v1 worker cannot"),
]

ENGINE_ARGUMENTS = [
    together([f"{SERVER}.extra_args=[{given}]"], f"{SERVER}.extra_args", f"got '{named}'; {RULED_OUT}")
    for given, named in [
        ("--quantization,fp8", "--quantization"),
        ("'--quantization=fp8'", "--quantization=fp8"),
        ("--rl-quant-profile,x.json", "--rl-quant-profile"),
        ("--kv-cache-dtype,fp8_e5m2", "--kv-cache-dtype"),
        ("--speculative-algorithm,EAGLE", "--speculative-algorithm"),
        ("--speculative-draft-model-path,draft", "--speculative-draft-model-path"),
        ("--image-processor-backend,pil", "--image-processor-backend"),
        ("'--mem-fraction-static=0.5','--port=1'", "--port=1"),
    ]
]

SLOTS = [
    together(
        ["cluster.gpus_per_node=1", f"{RESOURCES}.gpus_per_node=2"],
        f"{RESOURCES}.gpus_per_node",
        "got 2; asked 2 slots for engines, available 1",
    ),
    bad(f"{RESOURCES}.gpus_per_node", "3", "got 3; asked 3 slots for engines, available 3"),
    bad(f"{RESOURCES}.gpus_per_node", "0", "got 0; allowed: greater than or equal to 1"),
    bad(f"{RESOURCES}.gpus_per_node", "null", "got null; engines need 1 to 2 of the 3 slots"),
    bad(f"{RESOURCES}.num_nodes", "2", "got 2; at most cluster.num_nodes = 1"),
    bad(f"{SERVER}.num_gpus", "2", "got 2; asked 2, available 1"),
    together(
        ["cluster.gpus_per_node=4", f"{RESOURCES}.gpus_per_node=3", f"{SERVER}.num_gpus_per_engine=2"],
        f"{SERVER}.num_gpus_per_engine",
        "got 2; asked 2 per engine, available 3, which it must divide",
    ),
    together(["cluster.num_nodes=2"], f"{RESOURCES}.gpus_per_node", "got 1; on several nodes the engines take whole"),
]

CONTRADICTIONS = [
    bad("policy.train_global_batch_size", "192", "got 192; must divide grpo.num_prompts_per_step x"),
    bad("policy.train_global_batch_size", "1", "got 1; must be a multiple of the 2 data-parallel ranks"),
    bad(f"{DTENSOR}.tensor_parallel_size", "3", "got 3; must divide the 2 trainer ranks"),
    together(
        [f"{DTENSOR}.tensor_parallel_size=2", "policy.train_micro_batch_size=7"],
        "policy.train_micro_batch_size",
        "got 7; must divide 128, the samples of one data-parallel rank",
    ),
    bad("policy.train_micro_batch_size", "5", "got 5; must divide 64"),
    bad(f"{GENERATION}.max_new_tokens", "4096", "got 4096; must be below policy.max_total_sequence_length = 128"),
    bad(f"{SERVER}.weight_update_backend", "nccl", f"got 'nccl'; needs CUDA, and cluster.device is cpu; set {SERVER}"),
    with_lora(f"{LORA}.target_modules", "[q_proj]", f"got ['q_proj']; set {LORA}.match_all_linear=false with it"),
    together(
        [f"{LORA}.enabled=true", f"{LORA}.match_all_linear=false"],
        f"{LORA}.target_modules",
        f"got []; name layers, or set {LORA}.match_all_linear=true",
    ),
    bad("checkpointing.lora_export", "adapter", f"got 'adapter'; there is no adapter; set {LORA}.enabled=true"),
    together(
        [f"{DTENSOR}.tensor_parallel_size=2", f"{DTENSOR}.torch_compile=true"],
        f"{DTENSOR}.torch_compile",
        "got true; not supported with tensor_parallel_size 2; set ",
    ),
    bad(f"{DTENSOR}.cpu_offload", "true", "got true; needs CUDA, and cluster.device is cpu"),
    bad("data.num_train", "7", "got 7; must be at least grpo.num_prompts_per_step = 16"),
    bad("data.num_validation", "0", "got 0; validation needs at least 1"),
    bad("data.min_terms", "3", "got 3; must be at most data.max_terms = 2"),
    bad("data.min_digits", "3", "got 3; must be at most data.max_digits = 2"),
    bad("data.operators", "[+,+]", "got ['+', '+']; each may stand there once"),
    bad("data.prompt", "hello", "got 'hello'; must contain {problem}"),
    together(
        ["data.dataset_name=ResponseDataset", "data.train_data_path=x.jsonl"],
        "data.val_data_path",
        "got null; validation needs a file",
    ),
    together(
        ["data.dataset_name=pictures", "policy.tokenizer.name=other"],
        "policy.tokenizer.name",
        "got 'other'; only null with pictures: trainer and engine read them by the model's own processor",
    ),
]

WITHOUT_EFFECT = [
    bad(f"{LORA}.dim", "4", f"got 4; without effect here; set {LORA}.enabled=true"),
    bad(f"{LORA}.lora_A_init", "uniform", f"got 'uniform'; without effect here; set {LORA}.enabled=true"),
    bad(f"{LORA}.target_modules", "[q_proj]", f"got ['q_proj']; without effect here; set {LORA}.enabled=true"),
    bad(f"{TOLERANCE}.max_replacements", "3", f"got 3; without effect here; set {TOLERANCE}.use_fault_tolerance=true"),
    bad(f"{ROUTER}.cache_threshold", "0.5", f"got 0.5; without effect here; set {ROUTER}.policy=cache_aware"),
]

BAD_CONFIGS = [
    *UNKNOWN_KEYS, *MISSING_KEYS, *TYPES, *RANGES, *UNSUPPORTED, *ENGINE_ARGUMENTS, *SLOTS, *CONTRADICTIONS,
    *WITHOUT_EFFECT,
]  # fmt: skip
ONE_OF_EACH_KIND = [
    UNKNOWN_KEYS[0], MISSING_KEYS[0], TYPES[0], RANGES[0], UNSUPPORTED[0], ENGINE_ARGUMENTS[0], SLOTS[0], CONTRADICTIONS[0],
    WITHOUT_EFFECT[0],
]  # fmt: skip
