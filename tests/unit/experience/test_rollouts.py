import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.math_environment import MathEnvironment
from nemo_rl.experience.rollouts import run_rollout
from nemo_rl.models.generation.interfaces import GenerationInterface
from nemo_rl.models.tiny_model import make_character_tokenizer


class Repeater(GenerationInterface):
    """Answers with the prompt's last token, and keeps what it was asked."""

    def generate(self, data: BatchedDataDict, *, greedy: bool = False) -> BatchedDataDict:
        self.asked = data
        ids, ends = data["input_ids"], data["input_lengths"]
        output = torch.cat([ids, torch.zeros(len(ids), 1, dtype=torch.int64)], dim=1)
        rows = torch.arange(len(ids))
        output[rows, ends] = ids[rows, ends - 1]
        return BatchedDataDict(
            output_ids=output,
            logprobs=torch.zeros(output.shape),
            generation_lengths=torch.ones(len(ids), dtype=torch.int64),
            unpadded_sequence_lengths=ends + 1,
            truncated=torch.zeros(len(ids), dtype=torch.bool),
            weight_version=["1"] * len(ids),
        )

    def shutdown(self) -> None:
        pass


def make_prompts(**columns: list[object]) -> BatchedDataDict:
    tokenizer = make_character_tokenizer()
    ids = torch.tensor([tokenizer("37").input_ids, [*tokenizer("5").input_ids, 0]])
    texts = {"prompt": ["37", "5"], "reference": ["7", "4"]}
    return BatchedDataDict(input_ids=ids, input_lengths=torch.tensor([2, 1]), **texts, **columns)


def roll_out(prompts: BatchedDataDict) -> tuple[BatchedDataDict, BatchedDataDict, list[float]]:
    """What the engine was asked, the samples, their rewards."""
    generation = Repeater()
    environment = MathEnvironment("last_integer")
    rollout = run_rollout(prompts, generation=generation, environment=environment, tokenizer=make_character_tokenizer())
    return generation.asked, rollout.samples, rollout.rewards.tolist()


def test_text_alone_has_no_columns_of_pictures() -> None:
    asked, samples, rewards = roll_out(make_prompts())
    assert rewards == [1.0, 0.0]
    assert set(asked) == {"input_ids", "input_lengths"}
    assert "multimodal" not in samples
    assert samples["token_mask"].tolist() == [[0, 0, 1], [0, 1, 0]]


def test_pictures_go_to_the_engine_and_their_tensors_to_the_trainer_without_a_copy() -> None:
    tensors = {"pixel_values": torch.ones(16, 8), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    prompts = make_prompts(images=[["data:a"], []], multimodal=[tensors, {}]).repeat_interleave(2)
    asked, samples, _ = roll_out(prompts)
    assert asked["images"] == [["data:a"], ["data:a"], [], []]
    assert "multimodal" not in asked
    assert samples["multimodal"][0] is samples["multimodal"][1] is tensors
    assert samples["multimodal"][2:] == [{}, {}]
    assert samples.size == 4
