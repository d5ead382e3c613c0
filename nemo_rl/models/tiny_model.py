"""A tiny random Qwen3 with a character tokenizer, for tests that take seconds."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3ForCausalLM

_SEED = 0
_SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>", "<unk>"]
_CHARACTERS = ["\n", *map(chr, range(32, 127))]
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tiny_random_qwen3(folder: Path) -> None:
    """Write model (float32, about 0.1 M parameters, same weights every time) and tokenizer to `folder`."""
    tokenizer = make_character_tokenizer()
    make_tiny_qwen3(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_character_tokenizer() -> "PreTrainedTokenizerFast":
    """One token per printable ASCII character or newline; everything else is `<unk>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: index for index, token in enumerate([*_SPECIAL_TOKENS, *_CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=_CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def make_tiny_qwen3(vocab_size: int) -> "Qwen3ForCausalLM":
    """2 layers, hidden 64, 4 heads of 16 (2 for keys and values), untied head; seeded float32 weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype=torch.float32,
    )
    model = Qwen3ForCausalLM(config)
    fill_weights(model)
    return model


def fill_weights(model: "PreTrainedModel") -> None:
    """Draw every parameter in float32, the same each time."""
    import torch

    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            _fill(name, weight, generator)


def _fill(name: str, weight: "torch.Tensor", generator: "torch.Generator") -> None:
    """Weights far from their defaults: logits spread out, and a weight that was not sent shows in the output."""
    weight.normal_(generator=generator)
    if weight.dim() == 1:
        weight.mul_(0.1).add_(0.0 if name.endswith(".bias") else 1.0)
    elif not name.endswith("embed_tokens.weight"):
        weight.mul_(2.0 if name == "lm_head.weight" else 1.0).div_(weight[0].numel() ** 0.5)
