"""Tokenizers and processors of the tiny vision-language models: offline, one token per character."""

from pathlib import Path

from transformers import (
    CLIPImageProcessor,
    Gemma3ImageProcessor,
    Gemma3Processor,
    LlavaProcessor,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5Tokenizer,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from nemo_rl.models.tiny_model import make_character_tokenizer

_SPECIAL_TOKENS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<start_of_image>",
    "<image_soft_token>",
    "<end_of_image>",
    "<image>",
)
_NUM_PLAIN_TOKENS = len(make_character_tokenizer())
VOCAB_SIZE = _NUM_PLAIN_TOKENS + len(_SPECIAL_TOKENS)

QWEN2_PATCH_SIZE = 14
QWEN3_PATCH_SIZE = 16
QWEN_MERGE_SIZE = 2
FIXED_IMAGE_SIZE = 56
"""Edge in pixels of what Gemma3's and LLaVA's towers see."""
FIXED_PATCH_SIZE = 14
GEMMA3_TOKENS_PER_IMAGE = 4


def special_token_id(token: str) -> int:
    """Raises ValueError for a token that is none of the special ones."""
    return _NUM_PLAIN_TOKENS + _SPECIAL_TOKENS.index(token)


def write_qwen2_vl_processor(folder: Path) -> None:
    images, videos = _make_qwen2_readers()
    Qwen2VLProcessor(images, _make_tokenizer(), videos).save_pretrained(folder)


def write_qwen2_5_vl_processor(folder: Path) -> None:
    images, videos = _make_qwen2_readers()
    Qwen2_5_VLProcessor(images, _make_tokenizer(), videos).save_pretrained(folder)


def write_qwen3_vl_processor(folder: Path) -> None:
    _make_qwen3_processor(_make_tokenizer()).save_pretrained(folder)


def write_qwen3_5_processor(folder: Path) -> None:
    _make_qwen3_processor(_make_byte_level_tokenizer()).save_pretrained(folder)


def write_gemma3_processor(folder: Path) -> None:
    tokenizer = _make_tokenizer(
        boi_token="<start_of_image>", image_token="<image_soft_token>", eoi_token="<end_of_image>"
    )
    images = Gemma3ImageProcessor(size={"height": FIXED_IMAGE_SIZE, "width": FIXED_IMAGE_SIZE})
    Gemma3Processor(images, tokenizer, image_seq_length=GEMMA3_TOKENS_PER_IMAGE).save_pretrained(folder)


def write_llava_processor(folder: Path) -> None:
    size = {"height": FIXED_IMAGE_SIZE, "width": FIXED_IMAGE_SIZE}
    images = CLIPImageProcessor(size={"shortest_edge": FIXED_IMAGE_SIZE}, crop_size=size)
    processor = LlavaProcessor(
        images,
        _make_tokenizer(),
        patch_size=FIXED_PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    processor.save_pretrained(folder)


def _make_qwen2_readers() -> tuple[Qwen2VLImageProcessor, Qwen2VLVideoProcessor]:
    geometry = {"patch_size": QWEN2_PATCH_SIZE, "merge_size": QWEN_MERGE_SIZE, "size": _image_area(QWEN2_PATCH_SIZE)}
    return Qwen2VLImageProcessor(**geometry), Qwen2VLVideoProcessor(**geometry)


def _make_qwen3_processor(tokenizer: PreTrainedTokenizerBase) -> Qwen3VLProcessor:
    geometry = {"patch_size": QWEN3_PATCH_SIZE, "merge_size": QWEN_MERGE_SIZE, "size": _image_area(QWEN3_PATCH_SIZE)}
    return Qwen3VLProcessor(Qwen2VLImageProcessor(**geometry), tokenizer, Qwen3VLVideoProcessor(**geometry))


def _image_area(patch_size: int) -> dict[str, int]:
    """Bounds, in pixels, between which an image is scaled: 2x2 to 4x4 tokens."""
    token_area = (patch_size * QWEN_MERGE_SIZE) ** 2
    return {"shortest_edge": 4 * token_area, "longest_edge": 16 * token_area}


def _make_tokenizer(**named_tokens: str) -> PreTrainedTokenizerFast:
    """The character tokenizer and all special tokens; `named_tokens` become its attributes, as processors want them."""
    plain = make_character_tokenizer()
    plain.add_tokens(list(_SPECIAL_TOKENS), special_tokens=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        pad_token=plain.pad_token,
        bos_token=plain.bos_token,
        eos_token=plain.eos_token,
        unk_token=plain.unk_token,
        chat_template=plain.chat_template,
        model_max_length=plain.model_max_length,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=named_tokens,
    )


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
