"""Models that ranks cannot share are refused; those that they can are rows of `tests/parity`."""

from collections.abc import Iterator
from typing import Any

import policy_cases as cases
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma3nTextConfig,
    GptOssConfig,
    Llama4TextConfig,
    PretrainedConfig,
)

from nemo_rl.models.policy.tensor_parallel import check_tensor_parallel


@pytest.fixture
def on_meta() -> Iterator[Any]:
    with torch.device("meta"):
        yield AutoModelForCausalLM.from_config


@pytest.mark.parametrize(
    ("config", "size", "says"),
    [
        (
            cases.llama_config(tied=True),
            4,
            r"must divide what LlamaForCausalLM has: num_key_value_heads = 2\b.*; allowed: 1, 2$",
        ),
        (
            Llama4TextConfig(num_hidden_layers=1),
            2,
            r"plan of Llama4ForCausalLM: .*experts\.gate_up_proj: packed_rowwise",
        ),
        (GptOssConfig(num_hidden_layers=1), 2, r"no tensor-parallel plan for GptOssForCausalLM; allowed: 1$"),
        (CohereConfig(num_hidden_layers=1, use_qk_norm=True), 2, r"self_attn\.k_norm: no style, .*q_norm: no style"),
        (
            Gemma3nTextConfig(num_hidden_layers=5, num_kv_shared_layers=0),
            2,
            r"Gemma3nForCausalLM does not compute the same by the plan of trans",
        ),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused(
    config: PretrainedConfig, size: int, says: str, on_meta: Any
) -> None:
    with pytest.raises(ValueError, match=rf"^policy\.dtensor_cfg\.tensor_parallel_size: got {size}; .*{says}"):
        check_tensor_parallel(on_meta(config), size)


def test_a_module_with_a_style_that_is_not_known_is_refused(on_meta: Any) -> None:
    model = on_meta(cases.llama_config(tied=False))
    model.tp_plan["model.layers.*.mlp"] = "all_reduce"
    with pytest.raises(
        ValueError, match=r"not supported in the plan of LlamaForCausalLM: model\.layers\.\*\.mlp: all_"
    ):
        check_tensor_parallel(model, 2)
