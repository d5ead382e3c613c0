import math

import pytest
import torch

from nemo_rl.algorithms.advantage import group_advantages


def advantages(rewards: list[float], group_size: int, *, leave_one_out: bool, normalize: bool) -> list[float]:
    result = group_advantages(torch.tensor(rewards), group_size, leave_one_out=leave_one_out, normalize=normalize)
    assert result.dtype == torch.float32
    return result.tolist()


def test_mean_baseline_exact() -> None:
    assert advantages([1, 0, 0, 0, 1, 1, 0, 0], 4, leave_one_out=False, normalize=False) == [
        0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5,
    ]  # fmt: skip


def test_leave_one_out_baseline_exact() -> None:
    result = advantages([1, 0, 0, 0], 4, leave_one_out=True, normalize=False)
    assert result == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


def test_normalized_exact() -> None:
    # mean 1/4, sample standard deviation sqrt((9/16 + 3/16) / 3) = 1/2
    assert advantages([1, 0, 0, 0], 4, leave_one_out=False, normalize=True) == pytest.approx([1.5, -0.5, -0.5, -0.5])
    assert advantages([1, 0, 0, 0], 4, leave_one_out=True, normalize=True) == pytest.approx([2, -2 / 3, -2 / 3, -2 / 3])


def test_group_of_two_leave_one_out_is_the_difference() -> None:
    assert advantages([3, 1], 2, leave_one_out=True, normalize=False) == [2.0, -2.0]


@pytest.mark.parametrize("group_size", [2, 3, 8])
def test_leave_one_out_is_the_mean_baseline_scaled(group_size: int) -> None:
    rewards = torch.rand(5 * group_size, generator=torch.Generator().manual_seed(0))
    mean = group_advantages(rewards, group_size, leave_one_out=False, normalize=False)
    loo = group_advantages(rewards, group_size, leave_one_out=True, normalize=False)
    torch.testing.assert_close(loo, mean * group_size / (group_size - 1))


def test_leave_one_out_against_its_definition() -> None:
    rewards = [0.3, 0.9, 0.0, 0.5]
    expected = [r - (sum(rewards) - r) / 3 for r in rewards]
    assert advantages(rewards, 4, leave_one_out=True, normalize=False) == pytest.approx(expected)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -1e30, 1e-45])
@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_equal_rewards_give_exact_zeros(value: float, leave_one_out: bool, normalize: bool) -> None:
    assert advantages([value] * 7, 7, leave_one_out=leave_one_out, normalize=normalize) == [0.0] * 7


@pytest.mark.parametrize("rewards", [[0.0, 1e-45, 0.0], [1e38, -1e38, 0.0], [1.0, 1.0 + 1e-7, 1.0]])
def test_extreme_groups_stay_finite(rewards: list[float]) -> None:
    result = advantages(rewards, 3, leave_one_out=True, normalize=True)
    assert all(math.isfinite(value) for value in result)
    assert max(map(abs, result)) <= 1.7321 + 0.01


def test_groups_do_not_touch_each_other() -> None:
    alone = advantages([1, 0, 0], 3, leave_one_out=True, normalize=True)
    both = advantages([1, 0, 0, 5, 5, 9], 3, leave_one_out=True, normalize=True)
    assert both[:3] == alone


@pytest.mark.parametrize(
    ("rewards", "group_size", "message"),
    [
        ([1.0, 0.0], 1, "group_size: got 1"),
        ([1.0, 0.0, 1.0], 2, "do not divide into groups of 2"),
        ([1.0, math.nan], 2, "finite"),
        ([1.0, math.inf], 2, "finite"),
    ],
)
def test_refused(rewards: list[float], group_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        advantages(rewards, group_size, leave_one_out=True, normalize=True)
