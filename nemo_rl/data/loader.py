"""Batches of prompts."""

import random
from collections.abc import Sequence

import torch

from nemo_rl.data.chat import EncodedPrompt
from nemo_rl.data.image_files import read_image, to_data_uri
from nemo_rl.data.vision import VisionProcessor
from nemo_rl.distributed.batched_data_dict import BatchedDataDict


class PromptLoader:
    """Endless batches of `batch_size` different prompts, epoch after epoch.

    What does not fill a batch at the end of an epoch is left out of that epoch. The order of an epoch depends on the
    seed and the epoch's number alone.
    """

    def __init__(
        self,
        prompts: Sequence[EncodedPrompt],
        *,
        batch_size: int,
        pad_token_id: int,
        seed: int,
        shuffle: bool,
        vision: VisionProcessor | None = None,
    ) -> None:
        """Raises ValueError when there are fewer prompts than `batch_size`."""
        if len(prompts) < batch_size:
            raise ValueError(
                f"grpo.num_prompts_per_step: got {batch_size}, but the training set has only {len(prompts)} prompts"
            )
        self._prompts = prompts
        self._batch_size = batch_size
        self._pad_token_id = pad_token_id
        self._vision = vision
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._make_order()

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._epoch

    @property
    def num_batches_per_epoch(self) -> int:
        return len(self._prompts) // self._batch_size

    def next_batch(self) -> BatchedDataDict:
        """See `collate_prompts`; for training."""
        start = self._position * self._batch_size
        indices = self._order[start : start + self._batch_size]
        self._position += 1
        if self._position == self.num_batches_per_epoch:
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._make_order()
        return collate_prompts([self._prompts[i] for i in indices], self._pad_token_id, self._vision, for_training=True)

    def _make_order(self) -> list[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(f"{self._seed}:{self._epoch}").shuffle(order)
        return order


def collate_prompts(
    prompts: Sequence[EncodedPrompt],
    pad_token_id: int,
    vision: VisionProcessor | None = None,
    *,
    for_training: bool = False,
) -> BatchedDataDict:
    """`input_ids [batch, prompt_len]` int64, right-padded; `input_lengths [batch]` int64; lists `prompt`, `reference`.

    With `vision` also the list `images`: the data URIs of each prompt, of some none; and `for_training` the list
    `multimodal`: see `VisionProcessor.tensors`.
    """
    lengths = [len(prompt.token_ids) for prompt in prompts]
    input_ids = torch.full((len(prompts), max(lengths, default=0)), pad_token_id, dtype=torch.long)
    for row, prompt in zip(input_ids, prompts, strict=True):
        row[: len(prompt.token_ids)] = torch.tensor(prompt.token_ids, dtype=torch.long)
    batch = BatchedDataDict(
        input_ids=input_ids,
        input_lengths=torch.tensor(lengths, dtype=torch.long),
        prompt=[prompt.text for prompt in prompts],
        reference=[prompt.reference for prompt in prompts],
    )
    if vision is not None:
        batch["images"], tensors = [], []
        for prompt in prompts:
            # Decoded once for both ends, and not kept.
            images = [read_image(image) for image in prompt.images]
            batch["images"].append([to_data_uri(image) for image in images])
            if for_training:
                tensors.append(vision.tensors(images))
        if for_training:
            batch["multimodal"] = tensors
    return batch
