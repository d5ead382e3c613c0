"""From problems to token ids: the tokenizer, its chat template, its pad token."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nemo_rl.config.schema import TokenizerConfig
from nemo_rl.data.image_files import ImageSource
from nemo_rl.data.interfaces import Problem
from nemo_rl.data.vision import VisionProcessor

logger = logging.getLogger(__name__)

_KEY = "policy.tokenizer.chat_template"
_NAME_KEY = "policy.tokenizer.name"

# What a template's own code can raise beside Jinja's errors.
_TEMPLATE_ERRORS = (
    TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError,
)  # fmt: skip


def load_tokenizer(config: TokenizerConfig, model_folder: Path) -> PreTrainedTokenizerBase:
    """Load `config.name`, or the model's own; without a pad token, eos pads.

    Raises:
        ValueError: no such tokenizer, or it has no eos token; names the key.
    """
    source = config.name or str(model_folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{_NAME_KEY}: got {source!r}; cannot load a tokenizer from it ({reason})") from error
    ensure_special_tokens(tokenizer)
    return tokenizer


def ensure_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let eos pad where there is no pad token. Safe: lengths and masks tell padding apart, never the token id.

    Raises:
        ValueError: there is no eos token; names the key.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{_NAME_KEY}: got {tokenizer.name_or_path!r}; needs a tokenizer with an eos token")
    if tokenizer.pad_token_id is not None:
        return
    tokenizer.pad_token = tokenizer.eos_token
    logger.warning("the tokenizer has no pad token; its eos token %r pads", tokenizer.eos_token)


@dataclass(frozen=True)
class EncodedPrompt:
    text: str
    """What the model reads, template included."""
    token_ids: tuple[int, ...]
    """Each picture with all of its image tokens."""
    reference: Any
    images: tuple[ImageSource, ...] = ()
    """Read when the prompt is used: their tensors take a thousand times the memory of the text."""


class ChatEncoder:
    """Renders a user message, pictures first, and tokenizes it."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None, vision: VisionProcessor | None = None
    ) -> None:
        """
        Args:
            chat_template: `default`: the model's own; None: raw text; anything else: a Jinja template.
            vision: None: no message has a picture, and templates get plain strings.

        Raises:
            ValueError: there is no such template, or it cannot render a user message; names the key.
        """
        self._tokenizer = tokenizer
        self._vision = vision
        self._template = _find_template(tokenizer, chat_template, vision)
        if self._template is not None:
            self._probe()

    def render(self, prompt: str, num_images: int = 0) -> str:
        """The text that the model continues, with one image token per picture."""
        if self._template is None:
            return (self._vision.placeholder * num_images if self._vision else "") + prompt
        parts = [{"type": "image"}] * num_images + [{"type": "text", "text": prompt}]
        message: list[dict[str, Any]] = [{"role": "user", "content": parts if self._vision else prompt}]
        text = self._tokenizer.apply_chat_template(
            message, chat_template=self._template, add_generation_prompt=True, tokenize=False
        )
        return str(text)

    def encode(self, problem: Problem) -> EncodedPrompt:
        """Raises ValueError, with the problem's place, for image tokens that are no picture's and pictures of a bad form."""
        text = self.render(problem.prompt, len(problem.images))
        try:
            expanded = self._vision.expand(text, problem.images) if self._vision else text
        except ValueError as error:
            raise ValueError(f"{problem.place}: {error}") from error
        # A template writes its special tokens itself; raw text gets the ones that the tokenizer adds.
        token_ids = self._tokenizer(expanded, add_special_tokens=self._template is None)["input_ids"]
        return EncodedPrompt(text=text, token_ids=tuple(token_ids), reference=problem.reference, images=problem.images)

    def _probe(self) -> None:
        probe = "a < b"
        try:
            text = self.render(probe, num_images=1 if self._vision else 0)
        except _TEMPLATE_ERRORS as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{_KEY}: the template cannot render a user message ({reason})") from error
        if probe not in text:
            raise ValueError(f"{_KEY}: the template leaves out or changes the user's message; it gives {text!r}")
        if self._vision and (text.count(self._vision.image_token) != 1 or self._vision.placeholder not in text):
            raise ValueError(
                f"{_KEY}: the template gives a picture no placeholder {self._vision.placeholder!r} of its own; "
                f"it gives {text!r}"
            )


def encode_problems(
    problems: Sequence[Problem],
    encoder: ChatEncoder,
    max_total_sequence_length: int,
    *,
    kind: str = "",
    at_least: int = 0,
) -> list[EncodedPrompt]:
    """Encode all; leave out, with a logged count, what leaves no room for a response or gives no token at all.

    Args:
        kind: of the problems, for messages: `training`.
        at_least: how many are needed.

    Raises:
        ValueError: no problem gives any token, or too few are short enough; names the key.
    """
    encoded = [encoder.encode(problem) for problem in problems]
    if encoded and not any(prompt.token_ids for prompt in encoded):
        raise ValueError(f"{_NAME_KEY}: the tokenizer gives 0 tokens for each of {len(encoded)} prompts; needs another")
    kept = [prompt for prompt in encoded if 0 < len(prompt.token_ids) < max_total_sequence_length]
    if len(kept) < len(encoded):
        num_empty = sum(not prompt.token_ids for prompt in encoded)
        logger.warning(
            "left out %d of %d prompts: %d longer than %d tokens (policy.max_total_sequence_length - 1), %d empty",
            len(encoded) - len(kept), len(encoded), len(encoded) - len(kept) - num_empty,
            max_total_sequence_length - 1, num_empty,
        )  # fmt: skip
    # A response has one token at least.
    lengths = sorted(len(prompt.token_ids) + 1 for prompt in encoded if prompt.token_ids)
    needed = min(at_least, len(lengths))
    if len(kept) < needed:
        raise ValueError(
            f"policy.max_total_sequence_length: got {max_total_sequence_length}; {len(kept)} of {len(encoded)} {kind} "
            f"problems fit, and {needed} must; the shortest needs {lengths[0]}, so many need {lengths[needed - 1]}"
        )
    return kept


def _find_template(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None, vision: VisionProcessor | None
) -> str | None:
    if chat_template != "default":
        return chat_template
    if vision is not None and vision.chat_template:
        return vision.chat_template
    if not tokenizer.chat_template:
        raise ValueError(
            f"{_KEY}: got 'default', but the tokenizer has no chat template; "
            "set it to null for raw text, or to a Jinja template"
        )
    return str(tokenizer.get_chat_template())
