"""What must hold between keys. The schema checks each key alone."""

from collections.abc import Iterator

from nemo_rl.config.errors import ConfigError, refusal
from nemo_rl.config.layout import make_layout
from nemo_rl.config.schema import ArithmeticDataConfig, MasterConfig, ResponseDataConfig


def check_consistency(config: MasterConfig) -> None:
    """Raises ConfigError with one line per contradiction."""
    lines = [*_batch_lines(config), *_length_lines(config), *_data_lines(config)]
    if lines:
        raise ConfigError(lines)


def _batch_lines(config: MasterConfig) -> Iterator[str]:
    grpo, policy = config.grpo, config.policy
    ranks = make_layout(config).num_train_slots
    samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    size = policy.train_global_batch_size
    if samples % size:
        step = "grpo.num_prompts_per_step x grpo.num_generations_per_prompt"
        yield refusal("policy.train_global_batch_size", size, f"must divide {step} = {samples}")
    if size % ranks:
        yield refusal("policy.train_global_batch_size", size, f"must be a multiple of the {ranks} trainer ranks")
    elif (size // ranks) % policy.train_micro_batch_size:
        yield refusal(
            "policy.train_micro_batch_size",
            policy.train_micro_batch_size,
            f"must divide {size // ranks}, the samples of one rank (policy.train_global_batch_size / {ranks} ranks)",
        )


def _length_lines(config: MasterConfig) -> Iterator[str]:
    limit, new = config.policy.max_total_sequence_length, config.policy.generation.max_new_tokens
    if new >= limit:
        yield refusal(
            "policy.generation.max_new_tokens", new, f"must be below policy.max_total_sequence_length = {limit}"
        )


def _data_lines(config: MasterConfig) -> Iterator[str]:
    data, grpo = config.data, config.grpo
    validates = grpo.val_period > 0 or grpo.val_at_start or grpo.val_at_end
    off = "or set grpo.val_period=0 grpo.val_at_start=false grpo.val_at_end=false"
    if "{problem}" not in data.prompt:
        yield refusal("data.prompt", data.prompt, "must contain {problem}")
    if isinstance(data, ResponseDataConfig):
        if validates and data.val_data_path is None:
            yield refusal("data.val_data_path", None, f"validation needs a file; {off}")
        return
    if data.num_train < grpo.num_prompts_per_step:
        yield refusal(
            "data.num_train",
            data.num_train,
            f"must be at least grpo.num_prompts_per_step = {grpo.num_prompts_per_step}",
        )
    if validates and data.num_validation == 0:
        yield refusal("data.num_validation", 0, f"validation needs at least 1; {off}")
    if isinstance(data, ArithmeticDataConfig):
        for unit, low, high in (("terms", data.min_terms, data.max_terms), ("digits", data.min_digits, data.max_digits)):
            if low > high:
                yield refusal(f"data.min_{unit}", low, f"must be at most data.max_{unit} = {high}")
        if len(set(data.operators)) < len(data.operators):
            yield refusal("data.operators", data.operators, "each may stand there once")
