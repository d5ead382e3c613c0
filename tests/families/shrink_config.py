"""Rules that make any transformers config tiny: by attribute name, one set for all families.

Sizes follow from the names of the attributes, so that a family that nobody looked at shrinks too. Layers are chosen,
not counted: of every kind (dense or sparse, linear or full attention, tapped by deepstack or not) the first stays.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from itertools import pairwise
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

VOCABULARY = 128
MAX_NUM_LAYERS = 4

Fields = dict[str, Any]

LAYER_COUNTS = re.compile(
    r"((conf_)?num_hidden|num|n|(num_)?encoder|(num_)?decoder)_layers?|layers|depth|num_blocks|num_layers_per_stack"
)
"""Attributes that hold a number of layers; the first one found is the length of per-layer lists."""

TOKEN_IDS = re.compile(
    r"(?!num_).*_(token_ids?|token_index|tokens|start_id|end_id|newline_id)|newline_id|(mask|unk|pad)_index"
)

CAPS: tuple[tuple[str, int], ...] = (
    (r"vocab_offset", 64),
    (r".*vocab.*|.*codebook_size|num_embeddings", VOCABULARY),
    # Heads and their sizes: 4 heads of 8 make the hidden size; state-space layers have twice of it.
    (r".*(mamba|ssm)_?(n_|num_)?heads|n_mamba_heads", 8),
    (r".*linear_num_key_heads|index_n_heads", 2),
    (r".*(kv_heads|key_value_heads|kv_n_heads)", 2),
    (r".*heads|n_head|num_query_groups", 4),
    (r".*(head_dim|head_size|dim_head|headdim|d_head|d_kv)", 8),
    (r".*(d_state|state_size|rank)", 8),
    # Experts
    (r".*(experts_per_tok(en)?|top_?k(_experts)?|moe_k|shared_experts|topk_blocks)", 2),
    (r"n_group|num_expert_group|.*n_?groups|.*num_groups|index_kpool", 2),
    (r"topk_group", 1),
    (r".*(num|n|local|routed)_experts|zero_expert_num", 4),
    # Widths, distinct by role
    (r".*shared.*intermediate_size|share_expert_dim", 40),
    (r".*(moe|expert).*(intermediate_size|hidden_size)", 24),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|feed_forward_size|mlp_dim|mid_dim)", 48),
    (r"d_ff|dff|dim_ff|n_inner|d_inner", 48),
    (r".*(hidden_size|hidden_dim|hidden_size_\w+|d_model|n_embd|latent_size)", 32),
    (r".*(embed_dim|emb_dim|embedding_size|embedding_dim|output_dim|input_dim|input_size)", 32),
    (r".*(projection_dim|proj_dims?|lru_width|d_ssm|dim_model_base|per_layer_input|adapter_dim)", 32),
    (r".*(channels?|channel_size|num_filters|conv_dim|pos_feats|num_mel_bins)", 32),
    (r"channel_multiplier|num_res_blocks", 1),
    # Positions and pictures: 16 patches of 4 x 4
    (r".*(position_embeddings|n_positions|n_ctx|seq_len|context_length|_positions)", 64),
    (r"model_max_length|rel_extent|.*num_patches", 64),
    (r".*(image|img)_size|resolution|crop_size", 16),
    (r".*patch_size|patch_stride|pos_emb_height|pos_emb_width", 4),
    (r".*window(_size)?|.*chunk_size|.*block_size|.*chunk_length|.*topk", 4),
    (r".*(num_query_tokens|n_latents|num_latents|query_num|prompt_length|num_image_tokens|tokens_per_image)", 4),
    (r"split_ngram_parts|num_centroids|centroid_.*", 4),
    # Rhythm of layers
    (r".*(interval|period|frequency|every_n_layers|pattern|sparse_step)", 2),
    (r".*layer_offset|first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
)
"""Largest value of an integer attribute, by name; the first pattern that matches counts."""

PATTERNS = tuple((re.compile(pattern), cap) for pattern, cap in CAPS)

Fixes = Mapping[str, Mapping[str, Any]]
"""Per model type, final values of attributes; a config as value stands for its shrunk self."""

NEEDED: Fields = {"head_dim": 8, "num_key_value_heads": 2}
"""What a default config may leave as None although its model cannot be built without."""


class Shrinker:
    """Shrinks one config with all its sub-configs; token ids stay distinct and equal ids stay equal."""

    def __init__(self, fixes: Fixes) -> None:
        self.fixes = fixes
        self.token_ids: dict[int, int] = {}

    def shrink(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Return a new, tiny config of the same class."""
        declared = {field.name: field for field in fields(config) if field.name not in BASE_FIELDS}
        values = {name: vars(config)[config.attribute_map.get(name, name)] for name in declared}
        layers = choose_layers(values)
        tiny: Fields = {}
        for name, value in values.items():
            if isinstance(value, PreTrainedConfig):
                tiny[name] = self.shrink(value)
            elif value is None and is_concrete(config.sub_configs.get(name)):
                tiny[name] = self.shrink(config.sub_configs[name]())
            elif layers.count and is_layer_list(name, value, layers.count):
                tiny[name] = type(value)(layers.keep.index(index) for index in value if index in layers.keep)
            elif layers.count and is_per_layer(value, layers.count):
                tiny[name] = type(value)(self.shrink_value(name, value[index], values) for index in layers.keep)
            elif LAYER_COUNTS.fullmatch(name) and value == layers.count:
                tiny[name] = len(layers.keep)
            elif not is_derived(declared[name], value) or TOKEN_IDS.fullmatch(name) or has_mrope(value):
                tiny[name] = self.shrink_value(name, value, values)
        tiny |= undeclared_switches(config)
        for name, value in self.fixes.get(config.model_type, {}).items():
            tiny[name] = self.shrink(value) if isinstance(value, PreTrainedConfig) else value
        return type(config)(**tiny)

    def shrink_value(self, name: str, value: Any, values: Fields) -> Any:
        """Return the value of one attribute, tiny: integers by name, lists item by item, the rest unchanged."""
        if value is None:
            return NEEDED.get(name)
        if has_mrope(value):
            return {**value, "mrope_section": shrink_mrope_section(value["mrope_section"])}
        if isinstance(value, list | tuple):
            return type(value)(self.shrink_value(name, item, values) for item in value)
        if not isinstance(value, int) or isinstance(value, bool):
            return value
        if TOKEN_IDS.fullmatch(name):
            return self.shrink_token_id(value)
        if LAYER_COUNTS.fullmatch(name):
            return min(value, 2)
        if name == "num_key_value_heads" and value == values.get("num_attention_heads"):
            return min(value, 4)
        return min(value, next((cap for pattern, cap in PATTERNS if pattern.fullmatch(name)), value))

    def shrink_token_id(self, token_id: int) -> int:
        if token_id < VOCABULARY // 2:
            return token_id
        return self.token_ids.setdefault(token_id, VOCABULARY - 1 - len(self.token_ids))


@dataclass(frozen=True)
class Layers:
    keep: list[int]
    """Indices of the layers that stay, rising."""
    count: int
    """How many layers there were; 0 where the config counts none."""


def choose_layers(values: Fields) -> Layers:
    """Choose the first layer of every kind: of the same entries in all per-layer lists and lists of layer indices."""
    count = next((values[n] for n in values if LAYER_COUNTS.fullmatch(n) and type(values[n]) is int), 0)
    per_layer = [v for n, v in values.items() if is_per_layer(v, count) and not is_layer_list(n, v, count)]
    chosen = [v for n, v in values.items() if is_layer_list(n, v, count)]
    first_of_kind: dict[str, int] = {}
    for index in range(count):
        kind = repr([value[index] for value in per_layer] + [index in value for value in chosen])
        first_of_kind.setdefault(kind, index)
    keep = list(first_of_kind.values())[:MAX_NUM_LAYERS]
    return Layers(keep=keep if len(keep) > 1 else list(range(min(2, count))), count=count)


BASE_FIELDS = frozenset(field.name for field in fields(PreTrainedConfig))


def undeclared_switches(config: PreTrainedConfig) -> Fields:
    """Booleans that a config carries beyond its fields: `vision_use_head`."""
    declared = {field.name for field in fields(config)}
    beyond = {name: value for name, value in vars(config).items() if name not in declared and name[0] != "_"}
    return {name: value for name, value in beyond.items() if isinstance(value, bool)}


def has_mrope(value: Any) -> bool:
    return isinstance(value, dict) and "mrope_section" in value


def shrink_mrope_section(section: list[int]) -> list[int]:
    """Split half of a head dimension of 8 as the original does: the part that differs gets the two."""
    odd = next(value for value in section if section.count(value) == 1)
    return [2 if value == odd else 1 for value in section]


def is_concrete(config_class: type | None) -> bool:
    return config_class is not None and config_class is not AutoConfig


def is_derived(field: "Field[Any]", value: Any) -> bool:
    """Whether the config itself fills the field in from others, and will again."""
    return field.default is None and field.default_factory is MISSING and value is not None


def is_per_layer(value: Any, num_layers: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == num_layers > 0


def is_layer_list(name: str, value: Any, num_layers: int) -> bool:
    """Whether the field lists indices of layers: `deepstack_visual_indexes`, `full_attn_idxs`."""
    if re.search(r"idx|index|layer_ids|indices|_layers$", name) is None or not isinstance(value, list | tuple):
        return False
    rising = all(low < high for low, high in pairwise(value))
    return len(value) > 0 and all(type(item) is int and 0 <= item < num_layers for item in value) and rising
