"""Tokenizers and processors of the tiny vision-language models: offline, one token per character."""

from pathlib import Path

from transformers import (
    CLIPImageProcessor,
    Gemma3ImageProcessor,
    Gemma3Processor,
    LlavaProcessor,
    PreTrainedTokenizerBase,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5Tokenizer,
)

from nemo_rl.models.tiny_model import make_character_tokenizer
from nemo_rl.models.tiny_vision_model import (
    QWEN_MERGE_SIZE,
    QWEN_TOKENS,
    make_qwen3_vl_processor,
    make_vision_tokenizer,
    qwen_image_area,
)

_SPECIAL_TOKENS = (*QWEN_TOKENS, "<start_of_image>", "<image_soft_token>", "<end_of_image>", "<image>")
_NUM_PLAIN_TOKENS = len(make_character_tokenizer())
VOCAB_SIZE = _NUM_PLAIN_TOKENS + len(_SPECIAL_TOKENS)

QWEN2_PATCH_SIZE = 14
FIXED_IMAGE_SIZE = 56
"""Edge in pixels of what Gemma3's and LLaVA's towers see."""
FIXED_PATCH_SIZE = 14
GEMMA3_TOKENS_PER_IMAGE = 4


def special_token_id(token: str) -> int:
    """Raises ValueError for a token that is none of the special ones."""
    return _NUM_PLAIN_TOKENS + _SPECIAL_TOKENS.index(token)


def write_qwen2_vl_processor(folder: Path) -> None:
    images, videos = _make_qwen2_readers()
    Qwen2VLProcessor(images, make_vision_tokenizer(_SPECIAL_TOKENS), videos).save_pretrained(folder)


def write_qwen2_5_vl_processor(folder: Path) -> None:
    images, videos = _make_qwen2_readers()
    Qwen2_5_VLProcessor(images, make_vision_tokenizer(_SPECIAL_TOKENS), videos).save_pretrained(folder)


def write_qwen3_vl_processor(folder: Path) -> None:
    make_qwen3_vl_processor(make_vision_tokenizer(_SPECIAL_TOKENS)).save_pretrained(folder)


def write_qwen3_5_processor(folder: Path) -> None:
    make_qwen3_vl_processor(_make_byte_level_tokenizer()).save_pretrained(folder)


def write_gemma3_processor(folder: Path) -> None:
    tokenizer = make_vision_tokenizer(
        _SPECIAL_TOKENS, boi_token="<start_of_image>", image_token="<image_soft_token>", eoi_token="<end_of_image>"
    )
    images = Gemma3ImageProcessor(size={"height": FIXED_IMAGE_SIZE, "width": FIXED_IMAGE_SIZE})
    Gemma3Processor(images, tokenizer, image_seq_length=GEMMA3_TOKENS_PER_IMAGE).save_pretrained(folder)


def write_llava_processor(folder: Path) -> None:
    size = {"height": FIXED_IMAGE_SIZE, "width": FIXED_IMAGE_SIZE}
    images = CLIPImageProcessor(size={"shortest_edge": FIXED_IMAGE_SIZE}, crop_size=size)
    processor = LlavaProcessor(
        images,
        make_vision_tokenizer(_SPECIAL_TOKENS),
        patch_size=FIXED_PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    processor.save_pretrained(folder)


def _make_qwen2_readers() -> tuple[Qwen2VLImageProcessor, Qwen2VLVideoProcessor]:
    geometry = {
        "patch_size": QWEN2_PATCH_SIZE,
        "merge_size": QWEN_MERGE_SIZE,
        "size": qwen_image_area(QWEN2_PATCH_SIZE),
    }
    return Qwen2VLImageProcessor(**geometry), Qwen2VLVideoProcessor(**geometry)


def _make_byte_level_tokenizer() -> PreTrainedTokenizerBase:
    """The same tokens for AutoTokenizer, which gives Qwen3.5 its own class and with it a byte-level alphabet."""
    plain = make_character_tokenizer()
    aliases = {" ": "Ġ", "\n": "Ċ"}
    tokenizer: PreTrainedTokenizerBase = Qwen3_5Tokenizer(
        vocab={aliases.get(token, token): index for token, index in plain.get_vocab().items()},
        merges=[],
        pad_token=plain.pad_token,
        bos_token=plain.bos_token,
        eos_token=plain.eos_token,
        unk_token=plain.unk_token,
        chat_template=plain.chat_template,
        model_max_length=plain.model_max_length,
    )
    tokenizer.add_tokens(list(_SPECIAL_TOKENS), special_tokens=True)
    return tokenizer
