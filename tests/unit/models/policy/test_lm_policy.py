"""Which rank gets which samples, and whose answers count."""

from typing import Any

import policy_cases as cases
import pytest
import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.interfaces import TrainResult
from nemo_rl.models.policy.lm_policy import Policy


class FourRanks:
    """In the place of the worker group: records what each rank is given."""

    num_ranks = 4

    def __init__(self) -> None:
        self.given: list[BatchedDataDict] = []

    def run(self, method: str, *, timeout_s: float, per_rank: list[Any]) -> list[Any]:
        self.given = [arguments[0] for arguments in per_rank]
        if method == "train":
            return [TrainResult(loss=0.0, grad_norm=0.0, lr=0.0, metrics={})] * self.num_ranks
        return [BatchedDataDict(logprobs=data["input_ids"].float()) for data in self.given]


@pytest.fixture
def ranks() -> FourRanks:
    return FourRanks()


def make_policy(ranks: Any, tensor_parallel: int) -> Policy:
    policy = Policy(cfg=cases.policy_config(dtensor={"tensor_parallel_size": tensor_parallel}))
    policy._workers = ranks
    return policy


@pytest.mark.parametrize(
    ("tensor_parallel", "rows"),
    [
        (1, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (2, [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2),
        (4, [[0, 1, 2, 3, 4, 5, 6, 7]] * 4),
    ],
)
def test_ranks_that_share_matrices_get_the_same_samples(
    tensor_parallel: int, rows: list[list[int]], ranks: FourRanks
) -> None:
    policy = make_policy(ranks, tensor_parallel)
    batch = BatchedDataDict(input_ids=torch.arange(8)[:, None].expand(8, 3))
    assert torch.equal(policy.get_logprobs(batch)["logprobs"], batch["input_ids"].float())
    assert [data["input_ids"][:, 0].tolist() for data in ranks.given] == rows
    policy.train(BatchedDataDict.from_batches([batch, batch]), cases.WeightedLoss())
    assert [data["input_ids"][:, 0].tolist() for data in ranks.given] == [of_rank * 2 for of_rank in rows]
