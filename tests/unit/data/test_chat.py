import logging
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from nemo_rl.config.schema import TokenizerConfig
from nemo_rl.data.chat import ChatEncoder, encode_problems, ensure_pad_token, load_tokenizer
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


@pytest.mark.parametrize("template", ["{% for m in messages %}", "{{ raise_exception('no') }}", "{{ unknown.thing }}"])
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
        ensure_pad_token(tokenizer)
        ensure_pad_token(tokenizer)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert [record.getMessage() for record in caplog.records] == [
        "the tokenizer has no pad token; its eos token '<eos>' pads"
    ]


def test_neither_pad_nor_eos_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="policy.tokenizer.name: the tokenizer has neither"):
        ensure_pad_token(tokenizer)


def test_load_tokenizer(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "model")
    loaded = load_tokenizer(TokenizerConfig(), tmp_path / "model")
    assert loaded("1 < 2\n")["input_ids"] == tokenizer("1 < 2\n")["input_ids"]
    named = load_tokenizer(TokenizerConfig(name=str(tmp_path / "model")), tmp_path)
    assert named.get_vocab() == tokenizer.get_vocab()
    with pytest.raises(ValueError, match="policy.tokenizer.name: cannot load a tokenizer from"):
        load_tokenizer(TokenizerConfig(name=str(tmp_path / "none")), tmp_path / "model")
