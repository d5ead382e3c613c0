"""Pictures on their way from a problem to a batch: what the engine gets and what the trainer gets."""

import base64
import copy
import io
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import (
    AutoProcessor,
    PreTrainedTokenizerBase,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from nemo_rl.data.chat import ChatEncoder, encode_problems
from nemo_rl.data.image_files import ImageSource, read_image, to_data_uri, to_png
from nemo_rl.data.interfaces import Problem
from nemo_rl.data.loader import PromptLoader, collate_prompts
from nemo_rl.data.vision import VisionProcessor
from nemo_rl.models.policy.hf_folder import copy_processor
from nemo_rl.models.tiny_model import make_character_tokenizer, write_tiny_random_qwen3

TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
BARE = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>")
"""The engine would find no picture to count rotary positions for."""
SIZES = [(56, 56), (20, 31), (1, 1), (80, 64), (300, 200), (123, 457), (640, 480), (33, 900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Config and processor of a Qwen3-VL; pictures are scaled to between 4 and 64 tokens."""
    folder = tmp_path_factory.mktemp("qwen3_vl")
    tokenizer = make_character_tokenizer()
    tokenizer.add_tokens(list(TOKENS), special_tokens=True)
    ids = dict(zip(TOKENS, tokenizer.convert_tokens_to_ids(list(TOKENS)), strict=True))
    bounds = {"shortest_edge": 4 * 32**2, "longest_edge": 64 * 32**2}
    geometry = {"patch_size": 16, "merge_size": 2, "size": bounds}
    images, videos = Qwen2VLImageProcessor(**geometry), Qwen3VLVideoProcessor(**geometry)
    Qwen3VLProcessor(images, tokenizer, videos, chat_template=TEMPLATE).save_pretrained(folder)
    Qwen3VLConfig(
        architectures=["Qwen3VLForConditionalGeneration"],
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def vision(folder: Path) -> VisionProcessor:
    return VisionProcessor.load(folder)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoProcessor.from_pretrained(folder).tokenizer
    return tokenizer


def draw(size: tuple[int, int], seed: int = 0) -> bytes:
    noise = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed))
    return to_png(Image.fromarray(noise.byte().numpy()))


@pytest.mark.parametrize("sizes", [*([size] for size in SIZES), SIZES[:3]], ids=str)
def test_ids_and_tensors_are_those_of_the_models_own_processor(
    folder: Path, vision: VisionProcessor, tokenizer: PreTrainedTokenizerBase, sizes: list[tuple[int, int]]
) -> None:
    images = tuple(draw(size) for size in sizes)
    processor = AutoProcessor.from_pretrained(folder)
    for template, before in (("default", "user: "), (None, "")):
        prompt = ChatEncoder(tokenizer, template, vision).encode(Problem("what?", "3", images))
        assert prompt.text.startswith(before + vision.placeholder * len(sizes) + "what?")
        expected = processor(
            text=[prompt.text], images=[Image.open(io.BytesIO(image)) for image in images], return_tensors="pt"
        )
        assert list(prompt.token_ids) == expected["input_ids"][0].tolist()
        tensors = vision.tensors([read_image(image) for image in prompt.images])
        assert tensors.keys() == {"pixel_values", "image_grid_thw"}
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected[name])
        assert prompt.token_ids.count(vision.image_token_id) == int(tensors["image_grid_thw"].prod(1).sum()) // 4


@pytest.mark.parametrize("size", [(1, 1), (3, 3), (3, 9), (9, 3)], ids=str)
def test_a_picture_as_narrow_as_its_channels_is_not_guessed_at(
    vision: VisionProcessor, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(logging.getLogger("transformers.image_utils"), "warning", warned.append)
    picture = read_image(draw(size))
    tensors = vision.tensors([picture])
    assert warned == []
    expected = vision._images(images=[picture], return_tensors="pt")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


def test_a_problem_without_picture_is_plain_text(vision: VisionProcessor, tokenizer: PreTrainedTokenizerBase) -> None:
    for template, text in (("default", "user: 1 + 2"), (None, "1 + 2")):
        prompt = ChatEncoder(tokenizer, template, vision).encode(Problem("1 + 2", "3"))
        assert (prompt.text, tokenizer.decode(prompt.token_ids)) == (text, text)
    assert vision.tensors(()) == {}


def test_an_image_token_in_the_users_words_is_refused(
    vision: VisionProcessor, tokenizer: PreTrainedTokenizerBase
) -> None:
    encoder = ChatEncoder(tokenizer, None, vision)
    with pytest.raises(
        ValueError, match=r"^a.jsonl, line 7: the prompt has 2 image tokens \('<\|image_pad\|>'\) for 1 p"
    ):
        encoder.encode(Problem("see <|image_pad|>", "3", (draw((56, 56)),), "a.jsonl, line 7"))
    with pytest.raises(ValueError, match=r"^data: the prompt has 1 image token \('<\|image_pad\|>'\) for 0 pictures: "):
        encoder.encode(Problem("see <|image_pad|>", "3"))
    with pytest.raises(ValueError, match="^the prompt has 2 image tokens .* for 2 pictures: "):
        vision.expand("<|image_pad|><|image_pad|>", [draw((56, 56))] * 2)


def test_a_picture_of_a_form_that_the_model_does_not_take_is_named(
    vision: VisionProcessor, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    Image.new("L", (300, 1)).save(tmp_path / "line.png")
    with pytest.raises(
        ValueError, match=r"^a.jsonl, line 7: the picture .*/line\.png of 300 x 1 pixels is none for this model \(abs"
    ):
        ChatEncoder(tokenizer, None, vision).encode(Problem("what?", "3", (tmp_path / "line.png",), "a.jsonl, line 7"))


def test_an_export_keeps_the_template_that_the_processor_alone_has(
    folder: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model, export = tmp_path / "model", tmp_path / "export"
    shutil.copytree(folder, model)
    (model / "chat_template.jinja").unlink()
    (model / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    shutil.copytree(model, export, ignore=shutil.ignore_patterns("*processor*", "chat_template*"))
    text_only = copy.deepcopy(tokenizer)
    text_only.chat_template = "{{ messages[0]['content'] }}"
    text_only.save_pretrained(export)
    copy_processor(str(model), str(export))
    assert VisionProcessor.load(export).chat_template == TEMPLATE


def test_a_template_that_knows_no_pictures_is_refused(
    vision: VisionProcessor, tokenizer: PreTrainedTokenizerBase
) -> None:
    for template in ("{{ messages[0]['content'] }}", "{{ messages[0]['content'][-1]['text'] }}", BARE):
        with pytest.raises(ValueError, match="policy.tokenizer.chat_template: the template gives a picture no placeh"):
            ChatEncoder(tokenizer, template, vision)


def test_models_without_eyes_or_without_processor_are_refused(folder: Path, tmp_path: Path) -> None:
    write_tiny_random_qwen3(tmp_path / "text")
    with pytest.raises(ValueError, match="policy.model_name: got 'mine', a qwen3, and the data has pictures; allowed"):
        VisionProcessor.load(tmp_path / "text", "mine")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(ValueError, match="policy.model_name: cannot load the processor of "):
        VisionProcessor.load(tmp_path)


def test_every_image_token_counts_towards_the_longest_sequence(
    vision: VisionProcessor, tokenizer: PreTrainedTokenizerBase
) -> None:
    problems = [Problem("a", "1", (draw((64, 64)),)), Problem("b", "1", (draw((256, 256)),))]
    encoder = ChatEncoder(tokenizer, None, vision)
    assert [len(prompt.token_ids) for prompt in encode_problems(problems, encoder, 100)] == [7, 67]
    assert [prompt.text[-1] for prompt in encode_problems(problems, encoder, 67)] == ["a"]


def save(image: Image.Image, path: Path) -> Path:
    image.save(path)
    return path


def test_the_engine_gets_the_trainers_pixels_whatever_the_file(vision: VisionProcessor, tmp_path: Path) -> None:
    picture = Image.open(io.BytesIO(draw((40, 30))))
    sources: list[ImageSource] = [
        draw((40, 30)),
        save(picture, tmp_path / "a.jpg"),
        save(picture.convert("RGBA"), tmp_path / "a.png"),
        save(picture.convert("P"), tmp_path / "a.gif"),
        save(picture.convert("L"), tmp_path / "a.bmp"),
    ]
    for source in sources:
        kind, _, text = to_data_uri(read_image(source)).partition(",")
        assert kind == "data:image/png;base64"
        sent = Image.open(io.BytesIO(base64.b64decode(text)))
        assert (sent.mode, sent.size) == ("RGB", (40, 30))
        assert sent.tobytes() == read_image(source).tobytes()
    (tmp_path / "a.jpg").unlink()
    with pytest.raises(ValueError, match="cannot read the picture .*a.jpg"):
        read_image(tmp_path / "a.jpg")


def test_batches_carry_pictures_once_per_prompt(vision: VisionProcessor, tokenizer: PreTrainedTokenizerBase) -> None:
    encoder = ChatEncoder(tokenizer, None, vision)
    pictures = (draw((56, 56), seed=1), draw((80, 64), seed=2))
    prompts = [encoder.encode(Problem("q", "1", images)) for images in ((), pictures[:1], pictures)]
    settings = {"batch_size": 3, "pad_token_id": 0, "seed": 0, "shuffle": False}
    batch = PromptLoader(prompts, **settings, vision=vision).next_batch()
    assert [len(uris) for uris in batch["images"]] == [0, 1, 2]
    assert [len(tensors) for tensors in batch["multimodal"]] == [0, 2, 2]
    assert batch["multimodal"][2]["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 4]]
    groups = batch.repeat_interleave(2).slice(2, 6)
    assert [len(uris) for uris in groups["images"]] == [1, 1, 2, 2]
    assert groups["multimodal"][2] is groups["multimodal"][3] is batch["multimodal"][2]
    assert set(collate_prompts(prompts, 0)) == {"input_ids", "input_lengths", "prompt", "reference"}
    assert "multimodal" not in collate_prompts(prompts, 0, vision)
