"""A refit beside one raw broadcast of the same bytes, and the proof that what arrived is exact.

    uv run benchmarks/refit.py --config examples/configs/grpo_sglang_broadcast_cpu.yaml [key=value ...]

In one run: the raw broadcast (trainer rank 0 to 1, so it needs two ranks), whole refits as the loop makes them, and
then, after one training step, the engine's checksums against those of the same engine after it has loaded the trainer's
exported folder, and its log-probs against the trainer's own.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from nemo_rl.algorithms.grpo import Participants, prepare_batch
from nemo_rl.config.loader import load_config_or_exit
from nemo_rl.config.schema import MasterConfig
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.experience.rollouts import run_rollout
from nemo_rl.models.generation.sglang.sglang_generation import SGLangGeneration
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.workers.dtensor_policy_worker_v2 import DTensorPolicyWorkerV2
from nemo_rl.setup import prepare_inputs, start_participants
from nemo_rl.utils.log import configure_logging
from nemo_rl.utils.metrics import MetricsLogger
from nemo_rl.utils.run_folder import make_run_folder
from nemo_rl.utils.timer import Timer

NUM_REPEATS = 5
Report = dict[str, Any]


class MeasuringWorker(DTensorPolicyWorkerV2):
    def raw_broadcast_s(self, num_bytes: int) -> float:
        """Seconds of one broadcast of `num_bytes` from rank 0 to the other ranks."""
        payload = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        dist.barrier()
        start_s = time.perf_counter()
        dist.broadcast(payload, src=0)
        dist.barrier()
        return time.perf_counter() - start_s


def main() -> None:
    config = load_config_or_exit(sys.argv[1:], program="benchmarks/refit.py")
    configure_logging()
    folder = make_run_folder(config.logger.log_dir)
    with (
        MetricsLogger(folder.path, num_steps=1, tensorboard=False) as metrics,
        start_participants(config, prepare_inputs(config), folder, metrics, MeasuringWorker) as run,
    ):
        run.synchronizer.init_communicator()
        run.synchronizer.sync_weights()
        policy, generation = concrete(run)
        report = time_refits(run, policy) | prove(config, run, generation, folder.exported_model)
    (folder.path / "refit.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    show(report, folder.path)


def concrete(run: Participants) -> tuple[Policy, SGLangGeneration]:
    """What the loop sees as interfaces; a benchmark looks behind them."""
    assert isinstance(run.policy, Policy)
    assert isinstance(run.generation, SGLangGeneration)
    return run.policy, run.generation


def time_refits(run: Participants, policy: Policy) -> Report:
    num_bytes = int(run.synchronizer.metrics()["refit/bytes"])
    raw = repeat(lambda: max(policy.workers.run("raw_broadcast_s", timeout_s=600.0, num_bytes=num_bytes)))
    timer = Timer()
    seconds = [refit_spans(run, timer) for _ in range(1 + NUM_REPEATS)][1:]
    names = ("bytes", "tensors", "buckets")
    return {name: int(run.synchronizer.metrics()[f"refit/{name}"]) for name in names} | {
        "raw_s": raw,
        "refit_s": [spans["refit"] for spans in seconds],
        "verify_s": [spans["refit_verify"] for spans in seconds],
    }


def refit_spans(run: Participants, timer: Timer) -> dict[str, float]:
    """Seconds of one refit, and of its proof by `refit.verify`."""
    run.synchronizer.sync_weights(timer=timer)
    return timer.take()


def repeat(measure: Callable[[], float]) -> list[float]:
    """Seconds of each repeat, after one that does not count."""
    measure()
    return [measure() for _ in range(NUM_REPEATS)]


def prove(config: MasterConfig, run: Participants, generation: SGLangGeneration, exported: Path) -> Report:
    """One training step, a refit, and both comparisons."""
    prompts = run.train_prompts.next_batch().repeat_interleave(config.grpo.num_generations_per_prompt)
    rollout = run_rollout(prompts, generation=run.generation, environment=run.environment, tokenizer=run.tokenizer)
    batch = prepare_batch(config, run.policy, rollout)
    # Whatever the rewards are, the weights shall move.
    batch["advantages"] = torch.linspace(-1, 1, batch.size)
    run.policy.train(batch, run.loss_fn)
    before = generation.weight_checksums(Deadline(600))
    run.synchronizer.sync_weights()
    sent = generation.weight_checksums(Deadline(600))
    rollout = run_rollout(prompts, generation=run.generation, environment=run.environment, tokenizer=run.tokenizer)
    own = run.policy.get_logprobs(rollout.samples)["logprobs"]
    mask = rollout.samples["token_mask"].bool()
    difference = (own - rollout.samples["generation_logprobs"])[mask].abs()
    run.policy.export_hf(str(exported))
    generation.update_weights_from_disk(str(exported), Deadline(600))
    loaded = generation.weight_checksums(Deadline(600))
    return {
        "checksums": sum(len(digests) for digests in loaded),
        "checksums_moved_by_training": count(before, sent, equal=False),
        "checksums_equal_to_disk": count(sent, loaded, equal=True),
        "logprob_tokens": int(mask.sum()),
        "logprob_difference_mean": float(difference.mean()),
        "logprob_difference_max": float(difference.max()),
    }


def count(left: list[dict[str, str]], right: list[dict[str, str]], *, equal: bool) -> int:
    pairs = ((a[name], b[name]) for a, b in zip(left, right, strict=True) for name in a)
    return sum((x == y) is equal for x, y in pairs)


def show(report: Report, folder: Path) -> None:
    raw_s, refit_s, num_bytes = median(report["raw_s"]), median(report["refit_s"]), report["bytes"]
    console = Console(highlight=False)
    console.print(f"{num_bytes / 1e6:.0f} MB, {report['tensors']} tensors, {report['buckets']} buckets")
    for name, key in (("raw broadcast", "raw_s"), ("whole refit", "refit_s"), ("its proof", "verify_s")):
        seconds = report[key]
        spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
        rate = "" if key == "verify_s" else f"  {num_bytes / 1e6 / median(seconds):6.0f} MB/s"
        console.print(f"{name:<14} {median(seconds):6.2f} s  ({spread}, {len(seconds)} repeats){rate}")
    console.print(f"refit / raw    {refit_s / raw_s:6.2f}")
    console.print(
        f"after a step {report['checksums_moved_by_training']} of {report['checksums']} engine checksums differ; "
        f"after the refit {report['checksums_equal_to_disk']} equal those of the exported folder loaded from disk"
    )
    console.print(
        f"log-probs, trainer - engine: mean {report['logprob_difference_mean']:.2e}, "
        f"max {report['logprob_difference_max']:.2e} on {report['logprob_tokens']} tokens"
    )
    console.print(f"figures: {folder / 'refit.json'}")


if __name__ == "__main__":
    main()
