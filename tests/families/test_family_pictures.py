"""Log-probs of samples with pictures, for every class of the Qwen-VL families, against the class's own forward pass."""

from typing import Any

import pytest
import torch
import transformers
from family import Family, fill_weights
from PIL import Image
from transformers import AutoProcessor, PreTrainedModel
from vision_families import VISION_FAMILIES

from nemo_rl.models.policy.train_step import token_logprobs
from nemo_rl.models.policy.vision import GRIDS, PIXELS, PictureFormat, Pictures, find_vision_tower
from nemo_rl.models.tiny_vision_model import QWEN_IMAGE

FAMILIES = {
    family.name: family
    for family in VISION_FAMILIES
    if family.name in ("Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL, tied", "Qwen3-VL-MoE")
}
TOWERS = {
    "Qwen2-VL": "model.visual", "Qwen2.5-VL": "model.visual", "Qwen3-VL, tied": "model.visual",
    "Qwen3-VL-MoE": "model.visual", "Gemma3 VLM": "model.vision_tower", "LLaVA": "model.vision_tower",
}  # fmt: skip
PROMPTS = (f"a {QWEN_IMAGE} b", "no picture", f"{QWEN_IMAGE} and {QWEN_IMAGE}: which?")
SPARE_ID = 40


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def model(family: Family) -> PreTrainedModel:
    return make_model(family)


def make_model(family: Family) -> PreTrainedModel:
    made: PreTrainedModel = getattr(transformers, family.architecture)(family.make_config())
    fill_weights(made, seed=3)
    return made.eval()


@pytest.fixture(scope="module")
def samples(family: Family, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    """What the processor makes of each prompt alone."""
    folder = tmp_path_factory.mktemp("processor")
    family.make_config().save_pretrained(folder)
    family.write_tokenizer(folder)
    processor = AutoProcessor.from_pretrained(folder)
    colors = iter(("red", "green", "blue"))
    made = []
    for size, prompt in zip((56, 64, 120), PROMPTS, strict=True):
        images = [Image.new("RGB", (size, 2 * size), next(colors)) for _ in range(prompt.count(QWEN_IMAGE))]
        made.append(dict(processor(text=[prompt], images=images or None, return_tensors="pt")))
    return made


def plain(model: PreTrainedModel, sample: dict[str, torch.Tensor]) -> torch.Tensor:
    """`[seq - 1]`, with all that the processor gives and without padding."""
    logits = model(**sample).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, sample["input_ids"][0, 1:, None]).squeeze(1)


def pictures_of(samples: list[dict[str, torch.Tensor]]) -> list[Pictures]:
    return [{name: sample[name] for name in (PIXELS, GRIDS) if name in sample} for sample in samples]


def padded(samples: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids `[batch, seq]` and what is selected of them."""
    rows = [sample["input_ids"][0] for sample in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return ids, torch.arange(1, ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]


@torch.no_grad()
def test_a_batch_with_and_without_pictures_equals_each_sample_alone(
    model: PreTrainedModel, samples: list[dict[str, torch.Tensor]]
) -> None:
    ids, selected = padded(samples)
    got = token_logprobs(model, ids, selected, 1.0, pictures_of(samples))
    for row, sample in enumerate(samples):
        alone = plain(model, sample)
        torch.testing.assert_close(got[row, : len(alone)], alone, rtol=1e-4, atol=1e-5)
        assert not got[row, len(alone) :].any()
    blind = token_logprobs(
        model, ids, selected, 1.0, [{**one, PIXELS: -one[PIXELS]} if one else {} for one in pictures_of(samples)]
    )
    assert (blind - got).abs().amax(1)[[0, 2]].min() > 1e-3, "the pictures do not matter"
    assert torch.equal(blind[1], got[1])


def test_without_a_picture_the_tower_runs_and_nothing_comes_of_it(
    model: PreTrainedModel, samples: list[dict[str, torch.Tensor]]
) -> None:
    ids, selected = padded([samples[1], samples[1]])
    gradients = {}
    for pictures in (None, [{}, {}]):
        model.zero_grad()
        got = token_logprobs(model, ids, selected, 1.0, pictures)
        got.sum().backward()
        gradients[pictures is None] = {name: weight.grad for name, weight in model.named_parameters()}
        torch.testing.assert_close(got[0], plain(model, samples[1]), rtol=1e-5, atol=1e-5)
    tower = {id(weight) for weight in find_vision_tower(model).parameters()}
    for name, weight in model.named_parameters():
        if id(weight) in tower:
            assert gradients[True][name] is None, name
            assert gradients[False][name] is not None, f"{name} would be reduced on ranks with a picture alone"
            assert not gradients[False][name].any(), name
        else:
            torch.testing.assert_close(gradients[False][name], gradients[True][name], rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("row", [0, 1])
def test_a_sampled_image_token_keeps_its_own_embedding(
    family: Family, samples: list[dict[str, torch.Tensor]], row: int
) -> None:
    """It equals a spare token that has the same embedding, in the midst of the response."""
    model: Any = make_model(family)
    token_id = PictureFormat.of(model.config).token_id
    embedding = model.get_input_embeddings().weight
    embedding[SPARE_ID] = embedding[token_id]
    response = torch.tensor([[7, SPARE_ID, SPARE_ID, 9, 11]])
    sample = samples[row]
    ids = torch.cat([sample["input_ids"], response], dim=1)
    longer = {**sample, "input_ids": ids}
    for name in {"attention_mask", "mm_token_type_ids"} & sample.keys():
        filler = torch.full_like(response, int(name == "attention_mask"), dtype=sample[name].dtype)
        longer[name] = torch.cat([sample[name], filler], dim=1)
    expected = plain(model, longer)
    sampled = torch.where(ids == SPARE_ID, token_id, ids)
    selected = torch.ones(1, ids.shape[1] - 1, dtype=torch.bool)
    got = token_logprobs(model, sampled, selected, 1.0, pictures_of([sample]))[0]
    same = sampled[0, 1:] == ids[0, 1:]
    assert (~same).sum() == 2
    torch.testing.assert_close(got[same], expected[same], rtol=1e-4, atol=1e-5)


def test_pictures_that_fill_more_placeholders_than_there_are_are_an_error(
    model: PreTrainedModel, samples: list[dict[str, torch.Tensor]]
) -> None:
    ids, selected = padded([samples[1], samples[0]])
    with pytest.raises(
        AssertionError, match=r"pictures fill \[\d+, 0\] placeholders per sample; the ids have \[0, \d+\]"
    ):
        token_logprobs(model, ids, selected, 1.0, pictures_of([samples[0], samples[1]]))


@pytest.mark.parametrize("name", TOWERS)
def test_the_vision_tower_is_found(name: str) -> None:
    family = next(family for family in VISION_FAMILIES if family.name == name)
    with torch.device("meta"):
        model = getattr(transformers, family.architecture)(family.make_config())
    assert find_vision_tower(model) is model.get_submodule(TOWERS[name])
    language = {id(weight) for weight in model.model.language_model.parameters()}
    assert not language & {id(weight) for weight in find_vision_tower(model).parameters()}
