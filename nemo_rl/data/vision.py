"""What a vision-language model's processor makes of pictures: image tokens in a prompt, and tensors for the trainer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoProcessor

from nemo_rl.data.image_files import ImageSource, describe, read_size
from nemo_rl.models.model_source import read_config

MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Whose pictures are read alike at both ends. SGLang gives qwen2_vl other bounds of the size than its processor has."""
_KEY = "policy.model_name"


class VisionProcessor:
    """Pictures as one model reads them."""

    def __init__(self, processor: Any, placeholder: str, image_token_id: int) -> None:
        """
        Args:
            processor: the model's, from transformers.
            placeholder: what stands for one picture in a text, with one image token.
        """
        self._images = processor.image_processor
        self.image_token = str(processor.image_token)
        self.image_token_id = image_token_id
        self.placeholder = placeholder
        self.chat_template: str | None = processor.chat_template

    @classmethod
    def load(cls, model_folder: Path, model_name: str | None = None) -> "VisionProcessor":
        """Load the processor of a model, called `model_name` by the config.

        Raises:
            ValueError: the model takes no pictures or its processor cannot be loaded; names the key.
        """
        config: Any = read_config(model_folder)
        if config.model_type not in MODEL_TYPES:
            raise ValueError(
                f"{_KEY}: got {model_name or str(model_folder)!r}, a {config.model_type}, and the data has pictures; "
                f"allowed with pictures: {', '.join(MODEL_TYPES)}"
            )
        try:
            processor = AutoProcessor.from_pretrained(model_folder)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"{_KEY}: cannot load the processor of {model_folder} ({reason})") from error
        ids = [config.vision_start_token_id, config.image_token_id, config.vision_end_token_id]
        placeholder = "".join(processor.tokenizer.convert_ids_to_tokens(ids))
        return cls(processor, placeholder, int(config.image_token_id))

    def expand(self, text: str, images: Sequence[ImageSource]) -> str:
        """Repeat the image token of each picture as often as the model reads it.

        Raises:
            ValueError: the text has another number of image tokens than there are pictures, or two side by side, which
                the engine would take for one.
        """
        parts = text.split(self.image_token)
        if len(parts) - 1 != len(images) or "" in parts[1:-1]:
            tokens, pictures = _counted(len(parts) - 1, "image token"), _counted(len(images), "picture")
            raise ValueError(f"the prompt has {tokens} ({self.image_token!r}) for {pictures}: {text!r}")
        counts = [self._num_tokens(image) for image in images]
        pieces = [part + self.image_token * count for part, count in zip(parts, counts, strict=False)]
        return "".join([*pieces, parts[-1]])

    def tensors(self, images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        """`pixel_values [patches, dim]` float32, `image_grid_thw [images, 3]` int64; empty without pictures, which are RGB."""
        if not images:
            return {}
        # Said, and not left to guess: an edge of three pixels looks like three channels.
        pixels = [torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous() for image in images]
        return dict(self._images(images=pixels, input_data_format="channels_first", return_tensors="pt"))

    def _num_tokens(self, image: ImageSource) -> int:
        width, height = read_size(image)
        try:
            num_patches = int(self._images.get_number_of_image_patches(height, width, {}))
        except ValueError as error:
            raise ValueError(
                f"the picture {describe(image)} of {width} x {height} pixels is none for this model ({error})"
            ) from error
        return num_patches // int(self._images.merge_size) ** 2


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
