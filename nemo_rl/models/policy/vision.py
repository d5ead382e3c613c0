"""Pictures in the forward pass of a policy of the Qwen-VL families, and the vision tower that sees them.

Two things that a plain call of the model would get wrong:

- A rank whose micro-batch has no picture would not enter the vision tower and so not gather its weights, while other
  ranks wait for it there. Every micro-batch of a run with pictures therefore has one: where samples bring none, the
  smallest that there is, behind the padding of the first sample. Causal attention does not look there, and no log-prob is
  read there, so its gradient is exactly zero.
- A response may contain the token that stands for a part of a picture: the model sampled it. It is not a placeholder and
  keeps its own embedding, as it has in the engine.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from nemo_rl.models.model_source import find_model_class, read_config

PIXELS, GRIDS = "pixel_values", "image_grid_thw"

Pictures = Mapping[str, torch.Tensor]
"""Of one sample, as its processor gives them: `pixel_values [patches, dim]` float and `image_grid_thw [images, 3]` int64,
patches along time, height and width; empty for a sample without a picture."""


def find_vision_tower(model: PreTrainedModel) -> nn.Module:
    """The part that makes features of pixels; with the merger behind it where the model holds it inside.

    Raises:
        ValueError: there is none; names the key.
    """
    tower: nn.Module = model.get_encoder(modality="image")
    if tower is model or tower is model.base_model:
        raise ValueError(
            f"policy.freeze_vision_tower: got true; {type(model).__name__} has no vision tower that transformers finds; "
            "allowed: false"
        )
    return tower


def check_vision_tower(folder: Path) -> None:
    """Raise ValueError when the model of this folder has no vision tower to freeze. Reads its config alone."""
    config = read_config(folder)
    model_class: Any = find_model_class(config)
    with torch.device("meta"):
        find_vision_tower(model_class._from_config(config))


@dataclass(frozen=True)
class PictureFormat:
    """How a model takes pictures."""

    token_id: int
    """Its placeholder: one for each `merge_size x merge_size` patches."""
    merge_size: int
    patch_dim: int
    """Values of one patch."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> "PictureFormat":
        """Of a model of the Qwen-VL families."""
        vision: Any = config.vision_config
        return cls(
            token_id=int(config.image_token_id),
            merge_size=int(vision.spatial_merge_size),
            patch_dim=int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2),
        )

    def num_tokens(self, pictures: Pictures) -> int:
        """Placeholders of one sample."""
        return int(pictures[GRIDS].prod(-1).sum()) // self.merge_size**2 if pictures else 0

    def smallest(self, device: torch.device) -> Pictures:
        """A black picture of one placeholder."""
        edge = self.merge_size
        return {
            PIXELS: torch.zeros(edge**2, self.patch_dim, device=device),
            GRIDS: torch.tensor([[1, edge, edge]], device=device),
        }


@contextmanager
def forward_inputs(
    model: PreTrainedModel, input_ids: torch.Tensor, pictures: Sequence[Pictures] | None
) -> Iterator[dict[str, torch.Tensor]]:
    """The arguments of the model's forward; within, its embedding sees `input_ids` as they are.

    Rotary positions are made without an attention mask: each sample's are counted from its start, and padding is on the
    right.

    Args:
        input_ids: `[batch, seq]` int64, right-padded; the first tokens with the placeholder's id are placeholders.
        pictures: per sample, on the same device; None: a run without pictures.

    Yields:
        `input_ids [batch, seq or more]`, and with pictures all that belongs to them.

    Raises:
        AssertionError: a sample has fewer placeholders than its pictures fill.
    """
    if pictures is None:
        yield {"input_ids": input_ids}
        return
    form = PictureFormat.of(model.config)
    if not any(pictures):
        input_ids = nn.functional.pad(input_ids, (0, 1))
        input_ids[0, -1] = form.token_id
        pictures = [form.smallest(input_ids.device), *pictures[1:]]
        is_placeholder = torch.zeros_like(input_ids, dtype=torch.bool)
        is_placeholder[0, -1] = True
    else:
        is_placeholder = _find_placeholders(input_ids, pictures, form)
    is_sampled = (input_ids == form.token_id) & ~is_placeholder
    inputs = {
        # The model puts features wherever the id stands: hide those that are no placeholders from it.
        "input_ids": input_ids.masked_fill(is_sampled, int(form.token_id == 0)),
        "mm_token_type_ids": is_placeholder.int(),
        **{name: torch.cat([sample[name] for sample in pictures if sample]) for name in (PIXELS, GRIDS)},
    }
    embedding = model.get_input_embeddings()
    handle = embedding.register_forward_pre_hook(lambda _module, _args: (input_ids,), prepend=True)
    try:
        yield inputs
    finally:
        handle.remove()


def _find_placeholders(input_ids: torch.Tensor, pictures: Sequence[Pictures], form: PictureFormat) -> torch.Tensor:
    """`[batch, seq]` bool."""
    wanted = torch.tensor([form.num_tokens(sample) for sample in pictures], device=input_ids.device)
    is_image = input_ids == form.token_id
    found = is_image & (is_image.cumsum(1) <= wanted[:, None])
    if (found.sum(1) != wanted).any():
        raise AssertionError(
            f"pictures fill {wanted.tolist()} placeholders per sample; the ids have {is_image.sum(1).tolist()}"
        )
    return found
