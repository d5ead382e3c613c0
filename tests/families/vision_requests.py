"""Requests to `/generate` about text and about a picture, and what their answers say."""

import base64
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from family import Family
from PIL import Image

TEXT_PROMPT = "look: what is it?"
_WIDTH, _HEIGHT = 80, 64


def make_picture(seed: int) -> str:
    """Coarse colored noise as PNG, in a `data:` URL; every seed gives another picture, the same one each time."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((_WIDTH, _HEIGHT), Image.Resampling.NEAREST).save(file, format="PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def make_generate_body(family: Family, *, picture: str | None, num_tokens: int = 8) -> dict[str, Any]:
    """The JSON of a greedy request for exactly `num_tokens` tokens with their log-probs.

    Args:
        picture: from `make_picture`; None asks about text alone.

    Raises:
        ValueError: a picture for a family without `image_prompt`.
    """
    body: dict[str, Any] = {
        "text": TEXT_PROMPT,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True},
        "return_logprob": True,
    }
    if picture is None:
        return body
    if family.image_prompt is None:
        raise ValueError(f"{family.name}: takes no picture")
    return {**body, "text": family.image_prompt, "image_data": [picture]}


def read_token_ids(answer: Mapping[str, Any]) -> list[int]:
    """Ids of the generated tokens."""
    return [int(entry[1]) for entry in answer["meta_info"]["output_token_logprobs"]]


def read_logprobs(answer: Mapping[str, Any]) -> list[float]:
    """Log-probs of the generated tokens, in nats."""
    return [float(entry[0]) for entry in answer["meta_info"]["output_token_logprobs"]]
