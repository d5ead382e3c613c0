from typing import Any

import pytest
import torch

from nemo_rl.data.chat import EncodedPrompt
from nemo_rl.data.loader import PromptLoader, collate_prompts


def make_prompts(count: int) -> list[EncodedPrompt]:
    return [EncodedPrompt(str(i), tuple(range(1, 2 + i % 3)), i) for i in range(count)]


def make_loader(count: int, batch_size: int, **settings: Any) -> PromptLoader:
    return PromptLoader(
        make_prompts(count), batch_size=batch_size, pad_token_id=0, **{"seed": 1, "shuffle": True, **settings}
    )


def take(loader: PromptLoader, num_batches: int) -> list[list[int]]:
    return [loader.next_batch()["reference"] for _ in range(num_batches)]


def test_collate_pads_on_the_right() -> None:
    batch = collate_prompts([EncodedPrompt("ab", (5, 6), "x"), EncodedPrompt("c", (7,), "y")], pad_token_id=9)
    assert torch.equal(batch["input_ids"], torch.tensor([[5, 6], [7, 9]]))
    assert torch.equal(batch["input_lengths"], torch.tensor([2, 1]))
    assert batch["input_ids"].dtype == batch["input_lengths"].dtype == torch.int64
    assert (batch["prompt"], batch["reference"], batch.size) == (["ab", "c"], ["x", "y"], 2)


def take_epoch(loader: PromptLoader) -> list[int]:
    return [index for batch in take(loader, loader.num_batches_per_epoch) for index in batch]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_too_few_prompts_are_refused_with_both_numbers(count: int) -> None:
    with pytest.raises(ValueError, match=f"grpo.num_prompts_per_step: got 4, but the training set has only {count} "):
        make_loader(count, 4)


@pytest.mark.parametrize("count", [4, 5])
def test_n_and_n_plus_one_prompts_make_one_step_per_epoch(count: int) -> None:
    loader = make_loader(count, 4)
    assert loader.num_batches_per_epoch == 1
    for epoch in range(3):
        assert loader.epoch == epoch
        (batch,) = take(loader, 1)
        assert len(set(batch)) == 4


def test_an_epoch_holds_every_prompt_once_in_an_order_of_its_own() -> None:
    loader = make_loader(12, 4)
    first, second = take_epoch(loader), take_epoch(loader)
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    assert take_epoch(make_loader(12, 4)) == first
    assert take_epoch(make_loader(12, 4, seed=2)) != first


def test_without_shuffle_the_order_is_the_datasets() -> None:
    assert take(make_loader(5, 2, shuffle=False), 3) == [[0, 1], [2, 3], [0, 1]]
