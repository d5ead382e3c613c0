"""How an engine answers prompts with pictures, next to a plain model of transformers that gets what the trainer gets."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer

from nemo_rl.algorithms.mismatch import token_mult_prob_error
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.image_files import to_png
from nemo_rl.data.interfaces import Problem
from nemo_rl.data.loader import PromptLoader
from nemo_rl.data.vision import VisionProcessor
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.sglang.sglang_generation import SGLangGeneration

SIZES = ((80, 64), (20, 31), (56, 56), (300, 200), (123, 457))
NUM_PROMPTS = len(SIZES) + 4


def make_prompts(folder: Path) -> BatchedDataDict:
    """One picture of each size, again the first, another of its size, two pictures, none."""
    vision = VisionProcessor.load(folder)
    encoder = ChatEncoder(AutoTokenizer.from_pretrained(folder), None, vision)
    pictures = [(draw(size),) for size in SIZES]
    pictures += [(draw(SIZES[0]),), (draw(SIZES[0], seed=1),), (draw(SIZES[0]), draw(SIZES[1])), ()]
    prompts = [encoder.encode(Problem("what is it?", "1", images)) for images in pictures]
    assert len({len(prompt.token_ids) for prompt in prompts}) >= 5
    return PromptLoader(
        prompts, batch_size=NUM_PROMPTS, pad_token_id=0, seed=0, shuffle=False, vision=vision
    ).next_batch()


def draw(size: tuple[int, int], seed: int = 0) -> bytes:
    """Coarse colored noise as PNG."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return to_png(Image.fromarray(coarse).resize(size, Image.Resampling.NEAREST))


def check_pictures(generation: SGLangGeneration, folder: Path) -> None:
    """The engine holds the weights of `folder`. `generate` raises when its prompt tokens are not as many as ours.

    Raises:
        AssertionError: equal pictures are answered differently, different ones alike, or log-probs are not the model's.
    """
    prompts = make_prompts(folder)
    out = generation.generate(prompts, greedy=True)
    again = generation.generate(prompts, greedy=True)
    first, same, other = 0, len(SIZES), len(SIZES) + 1
    assert torch.equal(out["output_ids"], again["output_ids"])
    assert torch.equal(out["output_ids"][first], out["output_ids"][same])
    torch.testing.assert_close(out["logprobs"][first], out["logprobs"][same], rtol=0, atol=0.02)
    assert not torch.allclose(out["logprobs"][first], out["logprobs"][other], rtol=0, atol=0.02)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).eval()
    for row in range(NUM_PROMPTS):
        start, end = int(prompts["input_lengths"][row]), int(out["unpadded_sequence_lengths"][row])
        ids = out["output_ids"][row : row + 1, :end]
        mine = plain_logprobs(model, ids, start, prompts["multimodal"][row])
        error = token_mult_prob_error(mine, out["logprobs"][row : row + 1, start:end], torch.ones(mine.shape))
        assert error < 1.03, f"prompt {row}: {error}"


@torch.no_grad()
def plain_logprobs(model: Any, ids: torch.Tensor, start: int, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of `ids [1, seq]` from position `start` on, `[1, seq - start]`."""
    kinds = (ids == model.config.image_token_id).int()
    kinds[:, start:] = 0
    logits = model(input_ids=ids, mm_token_type_ids=kinds, **tensors).logits.float()
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return chosen[:, start - 1 :]
