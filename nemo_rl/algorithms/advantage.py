"""Advantages of GRPO: each sample against the other samples of its prompt."""

import torch


def group_advantages(rewards: torch.Tensor, group_size: int, *, leave_one_out: bool, normalize: bool) -> torch.Tensor:
    """Compare each reward with its group.

    With mean m and sample standard deviation s (divisor G - 1) of a group of G rewards:

    - baseline: m (GRPO, arXiv:2402.03300, section 4.1.1), or with `leave_one_out` the mean of the other G - 1 rewards (RLOO,
      arXiv:2402.14740, section 3.3), which makes the difference G / (G - 1) times larger and its expectation unbiased;
    - `normalize`: divide by s, of the whole group for both baselines: the standard deviation of the others is 0 for the
      only right answer of a group, the one sample that must count.

    A group without variance gives exactly 0. The result is finite for all finite rewards.

    Args:
        rewards: `[num_prompts * group_size]`, the samples of a prompt side by side.
        group_size: G, at least 2.

    Returns:
        `[num_prompts * group_size]` float32.

    Raises:
        ValueError: G < 2, a length that G does not divide, or a reward that is not finite.
    """
    _check(rewards, group_size)
    groups = rewards.double().view(-1, group_size)
    low, high = groups.amin(dim=1, keepdim=True), groups.amax(dim=1, keepdim=True)
    scale = torch.where(high > low, high - low, 1.0)
    # In units of the group's range nothing under- or overflows, whatever the size of the rewards.
    unit = (groups - low) / scale
    advantages = unit - unit.mean(dim=1, keepdim=True)
    if leave_one_out:
        advantages = advantages * group_size / (group_size - 1)
    if normalize:
        std = unit.std(dim=1, keepdim=True)
        advantages = advantages / torch.where(high > low, std, 1.0)
    else:
        advantages = advantages * scale
    return torch.where(high > low, advantages, 0.0).float().view(-1)


def _check(rewards: torch.Tensor, group_size: int) -> None:
    if group_size < 2:
        raise ValueError(f"group_size: got {group_size}; a group needs at least 2 samples")
    if rewards.dim() != 1 or len(rewards) % group_size:
        raise ValueError(f"rewards of shape {list(rewards.shape)} do not divide into groups of {group_size}")
    if not torch.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite; got {rewards.tolist()}")
