import logging
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from nemo_rl.config.schema import TokenizerConfig
from nemo_rl.data.chat import ChatEncoder, encode_problems, ensure_special_tokens, load_tokenizer
from nemo_rl.data.interfaces import Problem
from nemo_rl.models.tiny_model import make_character_tokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_character_tokenizer()


def test_default_template(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = ChatEncoder(tokenizer, "default").encode(Problem("1 + 2 =", "3"))
    assert prompt.text == "user: 1 + 2 =\nassistant: "
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert len(prompt.token_ids) == len(prompt.text)
    assert prompt.reference == "3"


def test_raw_text_and_own_template(tokenizer: PreTrainedTokenizerFast) -> None:
    assert ChatEncoder(tokenizer, None).render("1 + 2 =") == "1 + 2 ="
    own = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    assert ChatEncoder(tokenizer, own).render("1 + 2 =") == "[1 + 2 =]"


@pytest.mark.parametrize("content", ["", "<", "a < b <|im_end|> </s>", "{{ x }} {% if %}", "é\u2028\0"])
def test_any_content_is_encoded(tokenizer: PreTrainedTokenizerFast, content: str) -> None:
    prompt = ChatEncoder(tokenizer, "default").encode(Problem(content, "3"))
    assert prompt.text == f"user: {content}\nassistant: "
    assert len(prompt.token_ids) == len(prompt.text)


def test_missing_template_is_refused_but_raw_text_is_not(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    with pytest.raises(
        ValueError, match="policy.tokenizer.chat_template: got 'default', but the tokenizer has no chat"
    ):
        ChatEncoder(tokenizer, "default")
    assert ChatEncoder(tokenizer, None).render("x") == "x"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}", "{{ raise_exception('no') }}", "{{ unknown.thing }}", "{{ 1 / 0 }}", "{{ 1 + 'a' }}",
        "{{ 'x'.encode('no such') }}", "{{ range(1, 2, 0) }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)  # fmt: skip
def test_broken_template_is_refused(tokenizer: PreTrainedTokenizerFast, template: str) -> None:
    with pytest.raises(ValueError, match="policy.tokenizer.chat_template: the template cannot render a user message"):
        ChatEncoder(tokenizer, template)


def test_template_that_drops_the_message_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="policy.tokenizer.chat_template: the template leaves out"):
        ChatEncoder(tokenizer, "defualt")


def test_prompts_without_room_or_tokens_are_left_out_with_counts(
    tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = ChatEncoder(tokenizer, None)
    problems = [Problem("a" * length, str(length)) for length in (0, 1, 7, 8, 9)]
    with caplog.at_level(logging.WARNING):
        kept = encode_problems(problems, encoder, max_total_sequence_length=8)
    assert [prompt.reference for prompt in kept] == ["1", "7"]
    assert "left out 3 of 5 prompts: 2 longer than 7 tokens" in caplog.text
    assert "1 empty" in caplog.text


def test_pad_falls_back_to_eos_with_one_note(
    tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer.pad_token = None
    with caplog.at_level(logging.WARNING):
        ensure_special_tokens(tokenizer)
        ensure_special_tokens(tokenizer)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert [record.getMessage() for record in caplog.records] == [
        "the tokenizer has no pad token; its eos token '<eos>' pads"
    ]


@pytest.mark.parametrize("pad", [None, "<pad>"])
def test_without_eos_it_is_refused(tokenizer: PreTrainedTokenizerFast, pad: str | None) -> None:
    tokenizer.pad_token, tokenizer.eos_token = pad, None
    with pytest.raises(ValueError, match="policy.tokenizer.name: got .* needs a tokenizer with an eos token"):
        ensure_special_tokens(tokenizer)


def test_load_tokenizer(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "model")
    loaded = load_tokenizer(TokenizerConfig(), tmp_path / "model")
    assert loaded("1 < 2\n")["input_ids"] == tokenizer("1 < 2\n")["input_ids"]
    named = load_tokenizer(TokenizerConfig(name=str(tmp_path / "model")), tmp_path)
    assert named.get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer.json": "{"},
        {"tokenizer.json": "{}", "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}'},
        {"tokenizer.json": "[]", "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}'},
        {"tokenizer_config.json": "[]"},
        {"config.json": '{"model_type": "qwen3"}', "tokenizer_config.json": '{"tokenizer_class": 3}'},
    ],
    ids=["nothing", "half", "empty", "list", "list config", "class of a wrong type"],
)
def test_a_folder_without_a_usable_tokenizer_is_refused(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match="policy.tokenizer.name: got ") as caught:
        load_tokenizer(TokenizerConfig(name=str(tmp_path)), tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_gives_no_token_at_all_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    empty = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()), eos_token="</s>")
    problems = [Problem("1 + 2", "3"), Problem("3 + 4", "7")]
    with pytest.raises(ValueError, match="policy.tokenizer.name: the tokenizer gives 0 tokens for each of 2 prompts"):
        encode_problems(problems, ChatEncoder(empty, None), max_total_sequence_length=8)
    assert encode_problems([], ChatEncoder(tokenizer, None), max_total_sequence_length=8) == []
