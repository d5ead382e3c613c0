"""Decode attention for plain PyTorch: one call per layer, where SGLang's own makes one per sequence and layer.

At dozens of sequences that loop dominates a decode step on a few cores.
"""

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc


@dataclass(frozen=True)
class _DecodePlan:
    """Where the keys and values of a decode batch lie; the same for every layer."""

    slots: torch.Tensor
    """`[batch * max_len]` int64: rows of the KV pool."""
    mask: torch.Tensor
    """`[batch, 1, 1, max_len]` bool: true where the row belongs to the sequence."""


class BatchedDecodeAttnBackend(TorchNativeAttnBackend):
    """Pads the sequences of a decode batch to the longest; prefill and special layers stay as they are."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._plan: _DecodePlan | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        plain = forward_batch.forward_mode.is_decode() and forward_batch.encoder_lens is None
        self._plan = self._make_plan(forward_batch) if plain else None

    def _make_plan(self, forward_batch: Any) -> _DecodePlan:
        seq_lens = forward_batch.seq_lens
        max_len = int(seq_lens.max())
        mask = torch.arange(max_len, device=seq_lens.device) < seq_lens[:, None]
        slots = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices, :max_len]
        # Slots behind the end are left over from other requests; slot 0 is the pool's padding row.
        slots = slots.masked_fill(~mask, 0)
        return _DecodePlan(slots.flatten().long(), mask[:, None, None, :])

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        plan = self._plan
        if plan is None or not _is_plain(layer) or k is None:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        if save_kv_cache:
            where = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        return _attend(q, keys, values, plan, layer)


def _is_plain(layer: Any) -> bool:
    window = layer.sliding_window_size
    return not layer.is_cross_attention and (window is None or window < 0)


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: _DecodePlan, layer: Any) -> torch.Tensor:
    """One query token per sequence; query heads that share a KV head are the query rows of that head.

    Args:
        q: `[batch, num_heads * head_dim]`.
        keys, values: `[pool_size, num_kv_heads, head_dim]`.

    Returns:
        `[batch, num_heads * v_head_dim]`.
    """
    batch, max_len = plan.mask.shape[0], plan.mask.shape[-1]
    num_kv_heads = keys.shape[1]
    query = q.reshape(batch, num_kv_heads, -1, layer.qk_head_dim)
    key = _gather(keys, plan.slots).view(batch, max_len, num_kv_heads, -1).transpose(1, 2).to(query.dtype)
    value = _gather(values, plan.slots).view(batch, max_len, num_kv_heads, -1).transpose(1, 2).to(query.dtype)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=plan.mask, scale=layer.scaling)
    return out.reshape(batch, -1)


def _gather(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows of the pool, as an embedding look-up: a faster copy than plain indexing."""
    return torch.nn.functional.embedding(slots, pool.view(pool.shape[0], -1))
