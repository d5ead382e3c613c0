"""A tiny random Qwen3-VL with its processor, for tests that take seconds. One token per character and special token."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.models.tiny_model import fill_weights, make_character_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLProcessor

QWEN_TOKENS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
"""What stands for one picture in a prompt."""
QWEN3_PATCH_SIZE = 16
QWEN_MERGE_SIZE = 2
_HEAD_DIM = 16
_MAX_LENGTH = 2048
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + QWEN_IMAGE + "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tiny_random_qwen3_vl(folder: Path) -> None:
    """Write model (float32, about 0.2 M parameters, same weights every time), tokenizer and processor to `folder`."""
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    tokenizer = make_vision_tokenizer(QWEN_TOKENS)
    config: Any = make_tiny_qwen3_vl_config(vocab_size=len(tokenizer), tied=False)
    config.dtype = config.text_config.dtype = config.vision_config.dtype = torch.float32
    model = Qwen3VLForConditionalGeneration(config)
    fill_weights(model)
    model.save_pretrained(folder)
    make_qwen3_vl_processor(tokenizer).save_pretrained(folder)


def make_vision_tokenizer(special_tokens: Sequence[str], **named_tokens: str) -> "PreTrainedTokenizerFast":
    """The character tokenizer and, after its tokens, `special_tokens`; `named_tokens` become its attributes."""
    from transformers import PreTrainedTokenizerFast

    plain = make_character_tokenizer()
    plain.add_tokens(list(special_tokens), special_tokens=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        pad_token=plain.pad_token,
        bos_token=plain.bos_token,
        eos_token=plain.eos_token,
        unk_token=plain.unk_token,
        chat_template=_CHAT_TEMPLATE,
        model_max_length=plain.model_max_length,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=named_tokens,
    )


def make_qwen3_vl_processor(tokenizer: "PreTrainedTokenizerBase") -> "Qwen3VLProcessor":
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    geometry = {
        "patch_size": QWEN3_PATCH_SIZE,
        "merge_size": QWEN_MERGE_SIZE,
        "size": qwen_image_area(QWEN3_PATCH_SIZE),
    }
    images, videos = Qwen2VLImageProcessor(**geometry), Qwen3VLVideoProcessor(**geometry)
    return Qwen3VLProcessor(images, tokenizer, videos, chat_template=tokenizer.chat_template)


def qwen_image_area(patch_size: int) -> dict[str, int]:
    """Bounds, in pixels, between which an image is scaled: 2x2 to 4x4 tokens."""
    token_area = (patch_size * QWEN_MERGE_SIZE) ** 2
    return {"shortest_edge": 4 * token_area, "longest_edge": 16 * token_area}


def make_tiny_qwen3_vl_config(*, vocab_size: int, tied: bool) -> "Qwen3VLConfig":
    """Two layers of text, and two of vision, both of which feed the text layers."""
    from transformers import Qwen3VLConfig

    return Qwen3VLConfig(
        text_config=qwen3_text(vocab_size),
        vision_config={**qwen3_vision(), "deepstack_visual_indexes": [0, 1]},
        tie_word_embeddings=tied,
        **qwen_token_ids(),
    )


def tiny_text(vocab_size: int) -> dict[str, Any]:
    """Of any family."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": _MAX_LENGTH,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def qwen3_text(vocab_size: int) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    return {**tiny_text(vocab_size), "head_dim": _HEAD_DIM, "rope_parameters": rope}


def qwen3_vision() -> dict[str, Any]:
    return {
        "depth": 2,
        "num_heads": 2,
        "spatial_merge_size": QWEN_MERGE_SIZE,
        "hidden_size": 32,
        # On a CPU the engine makes it a multiple of 64 and then finds the checkpoint too small.
        "intermediate_size": 128,
        "out_hidden_size": 64,
        "patch_size": QWEN3_PATCH_SIZE,
        "num_position_embeddings": 16,
    }


def qwen_token_ids() -> dict[str, Any]:
    """Of a tokenizer whose special tokens begin with `QWEN_TOKENS`."""
    first = len(make_character_tokenizer())
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    return {name: first + QWEN_TOKENS.index(token) for name, token in names.items()}
