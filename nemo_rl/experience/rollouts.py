"""Prompts + generation + environment -> scored samples."""

import itertools
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentInterface
from nemo_rl.models.generation.interfaces import GenerationInterface


class Decoder(Protocol):
    """The part of a tokenizer that rollouts use."""

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False) -> list[str]: ...


@dataclass(frozen=True)
class Rollout:
    """Samples with their rewards."""

    samples: BatchedDataDict
    """`input_ids [batch, seq]`, `input_lengths [batch]`, `token_mask [batch, seq]` (1 on response tokens),
    `sample_mask [batch]`, `generation_logprobs [batch, seq]`, `truncated [batch]`; where the prompts have it, the list
    `multimodal`: the tensors of each sample's pictures, one object for all samples of a prompt."""
    rewards: torch.Tensor
    """`[batch]` float32."""
    prompts: list[str]
    responses: list[str]
    references: list[Any]
    weight_versions: list[str]

    def examples(self, num: int) -> list[dict[str, Any]]:
        """The first `num` samples, for reading."""
        rows = zip(self.prompts, self.responses, self.references, self.rewards.tolist(), strict=True)
        names = ("prompt", "response", "reference", "reward")
        return [dict(zip(names, row, strict=True)) for row in itertools.islice(rows, num)]

    @property
    def mean_length(self) -> float:
        """Response tokens per sample."""
        return float(self.samples["token_mask"].sum() / len(self.responses))

    @property
    def truncated_fraction(self) -> float:
        return float(self.samples["truncated"].float().mean())


def run_rollout(
    prompts: BatchedDataDict,
    *,
    generation: GenerationInterface,
    environment: EnvironmentInterface,
    tokenizer: Decoder,
    greedy: bool = False,
) -> Rollout:
    """One response per row of `prompts` (see `PromptLoader.next_batch`), scored."""
    inputs = BatchedDataDict(
        {name: prompts[name] for name in ("input_ids", "input_lengths", "images") if name in prompts}
    )
    out = generation.generate(inputs, greedy=greedy)
    starts, ends = prompts["input_lengths"], out["unpadded_sequence_lengths"]
    rows = zip(out["output_ids"].tolist(), starts.tolist(), ends.tolist(), strict=True)
    responses = tokenizer.batch_decode([ids[start:end] for ids, start, end in rows], skip_special_tokens=True)
    rewards = environment.score(responses, prompts["reference"])
    positions = torch.arange(out["output_ids"].shape[1])
    samples = BatchedDataDict(
        {
            "input_ids": out["output_ids"],
            "input_lengths": ends,
            "token_mask": ((positions >= starts[:, None]) & (positions < ends[:, None])).float(),
            "sample_mask": torch.ones(len(responses)),
            "generation_logprobs": out["logprobs"],
            "truncated": out["truncated"],
        }
    )
    if "multimodal" in prompts:
        samples["multimodal"] = prompts["multimodal"]
    return Rollout(
        samples=samples,
        rewards=torch.tensor(rewards, dtype=torch.float32),
        prompts=prompts["prompt"],
        responses=responses,
        references=prompts["reference"],
        weight_versions=out["weight_version"],
    )
