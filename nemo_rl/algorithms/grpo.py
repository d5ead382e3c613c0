"""GRPO, synchronous: generate, score, compare within the group, train, send the weights."""

import logging
from dataclasses import dataclass

from nemo_rl.algorithms.advantage import group_advantages
from nemo_rl.algorithms.mismatch import token_mult_prob_error
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data.loader import PromptLoader
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentInterface
from nemo_rl.experience.rollouts import Decoder, Rollout, run_rollout
from nemo_rl.models.generation.interfaces import UpdatableGeneration
from nemo_rl.models.policy.interfaces import LossFunction, PolicyInterface, TrainResult
from nemo_rl.utils.metrics import MetricsLogger
from nemo_rl.utils.timer import Timer
from nemo_rl.weight_sync.interfaces import WeightSynchronizer
from nemo_rl.weight_sync.recovering_generation import RecoveringGeneration

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Participants:
    """Everything that the loop calls."""

    policy: PolicyInterface
    generation: UpdatableGeneration
    synchronizer: WeightSynchronizer
    environment: EnvironmentInterface
    tokenizer: Decoder
    train_prompts: PromptLoader
    validation_prompts: BatchedDataDict | None
    loss_fn: LossFunction
    metrics: MetricsLogger


def grpo_train(config: MasterConfig, run: Participants) -> None:
    """The whole run: refit before the first rollout, then one step after the other."""
    timer = Timer()
    run.synchronizer.init_communicator()
    run.synchronizer.sync_weights(timer=timer)
    if config.grpo.val_at_start:
        run.metrics.log(0, validate(config, run, step=0))
    timer.take()
    num_steps = count_steps(config, run.train_prompts)
    for step in range(1, num_steps + 1):
        metrics = train_step(config, run, timer)
        if _validates(config, step, is_last=step == num_steps):
            metrics |= validate(config, run, step=step)
        run.metrics.log(step, metrics)


def train_step(config: MasterConfig, run: Participants, timer: Timer) -> dict[str, float]:
    """One GRPO step; returns its metrics."""
    prompts = run.train_prompts.next_batch().repeat_interleave(config.grpo.num_generations_per_prompt)
    with timer.span("generate"):
        rollout = sample(run, prompts)
    check_versions(rollout, run.synchronizer.version)
    with timer.span("train"):
        batch = prepare_batch(config, run.policy, rollout)
        result = run.policy.train(batch, run.loss_fn)
        run.synchronizer.mark_stale()
    run.synchronizer.sync_weights(timer=timer)
    return collect_metrics(rollout, batch, result, timer.take()) | run.synchronizer.metrics()


def sample(run: Participants, prompts: BatchedDataDict, *, greedy: bool = False) -> Rollout:
    """One scored response per prompt, also when engines are lost meanwhile."""
    generation = RecoveringGeneration(run.generation, run.synchronizer)
    return run_rollout(
        prompts, generation=generation, environment=run.environment, tokenizer=run.tokenizer, greedy=greedy
    )


def check_versions(rollout: Rollout, version: int) -> None:
    """Raises AssertionError when a sample is not of the weights that the last refit sent."""
    other = sorted({reported for reported in rollout.weight_versions if reported != str(version)})
    if other:
        raise AssertionError(f"samples of weight version {', '.join(other)}; the last refit was version {version}")


def prepare_batch(config: MasterConfig, policy: PolicyInterface, rollout: Rollout) -> BatchedDataDict:
    """The samples with advantages and the log-probs that the loss compares."""
    batch = BatchedDataDict(rollout.samples)
    batch["advantages"] = group_advantages(
        rollout.rewards,
        config.grpo.num_generations_per_prompt,
        leave_one_out=config.grpo.use_leave_one_out_baseline,
        normalize=config.grpo.normalize_rewards,
    )
    batch["prev_logprobs"] = policy.get_logprobs(batch)["logprobs"]
    if config.loss_fn.reference_policy_kl_penalty > 0:
        batch["reference_logprobs"] = policy.get_reference_policy_logprobs(batch)["reference_logprobs"]
    return batch


def validate(config: MasterConfig, run: Participants, *, step: int) -> dict[str, float]:
    """Greedy accuracy on the held-out problems."""
    if run.validation_prompts is None:
        return {}
    prompts = run.validation_prompts.slice(0, config.grpo.max_val_samples)
    rollout = sample(run, prompts, greedy=True)
    run.metrics.log_samples(step, rollout.examples(config.logger.num_val_samples_to_print))
    return {
        "validation/accuracy": float(rollout.rewards.mean()),
        "validation/mean_length": rollout.mean_length,
        "validation/truncated_fraction": rollout.truncated_fraction,
    }


def collect_metrics(
    rollout: Rollout, batch: BatchedDataDict, result: TrainResult, seconds: dict[str, float]
) -> dict[str, float]:
    """One flat mapping per step, under the names of `metrics.jsonl`."""
    mismatch = token_mult_prob_error(batch["prev_logprobs"], batch["generation_logprobs"], batch["token_mask"])
    return {
        "train/reward_mean": float(rollout.rewards.mean()),
        "train/reward_std": float(rollout.rewards.std(unbiased=False)),
        "train/loss": result.loss,
        "train/grad_norm": result.grad_norm,
        "train/lr": result.lr,
        "train/token_mult_prob_error": mismatch,
        **{f"train/{name}": value for name, value in result.metrics.items()},
        "gen/mean_length": rollout.mean_length,
        "gen/truncated_fraction": rollout.truncated_fraction,
        **{f"time/{name}_s": value for name, value in seconds.items()},
    }


def count_steps(config: MasterConfig, prompts: PromptLoader) -> int:
    """`max_num_steps`, or what `max_num_epochs` give, whichever is less."""
    return min(config.grpo.max_num_steps, config.grpo.max_num_epochs * prompts.num_batches_per_epoch)


def _validates(config: MasterConfig, step: int, *, is_last: bool) -> bool:
    grpo = config.grpo
    return (is_last and grpo.val_at_end) or (grpo.val_period > 0 and step % grpo.val_period == 0)
