"""``PolicyModel``: Megatron's HybridModel for token trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor

from megatron_eqlen.hf.config import ModelConfig


class PolicyModel(HybridModel):
    """HybridModel with rotary angles at explicit positions and a head at the supervised positions."""

    model_config: ModelConfig
    """Configuration from which ``build_model`` made the model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process:  # its input is gathered first, so that positions can be selected
            self.output_layer.sequence_parallel = False

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        supervised: Tensor | None = None,
        head: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return hidden states; on the last pipeline stage logits, or the output of ``head``.

        Args:
            input_ids: [b, s] int64. Needed on every stage, for the sizes.
            position_ids: [b, s] int64, a token's depth on its path. Equal for all sequences of a batch.
            packed_seq_params: a row's token trees (``TreeParams``, b = 1); None: plain causal sequences.
            supervised: [n] int64, the positions of the loss (b = 1); None: all. The head is computed, and
                the router's auxiliary loss counts, only there.
            head: called instead of the output layer, with hidden states [n or s, hidden] (b = 1), the same on
                every tensor-parallel rank, and the output layer's weight [vocab / TP, hidden].
        Returns: [b, n or s, vocab / TP] in the model's dtype, or what ``head`` returned, or hidden states
            [s (/ TP with sequence parallel), b, hidden].
        """
        assert supervised is None or input_ids.shape[0] == 1, "supervised positions need a batch of one row"
        embedded = self.embedding(input_ids, position_ids) if self.pre_process else None
        if embedded is not None and torch.is_grad_enabled() and not embedded.requires_grad:
            embedded.requires_grad_()  # frozen; recomputed layers have gradients only if their input has
        # [s (/ TP), b, hidden]; later stages get theirs from the stage before
        hidden = self.decoder(
            hidden_states=embedded,
            attention_mask=attention_mask,
            rotary_pos_emb=self._rotary_angles(position_ids[0]),
            packed_seq_params=packed_seq_params,
            padding_mask=self._left_out(supervised, input_ids),
        )
        if not self.post_process:
            return hidden
        hidden = self._select(hidden, supervised)
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        assert weight is not None
        if head is not None:
            return head(hidden[:, 0], weight)
        logits, _ = self.output_layer(hidden, weight=weight)
        return logits.transpose(0, 1).contiguous()

    def _rotary_angles(self, positions: Tensor) -> Tensor:
        """[s] -> [s, 1, 1, rotary dim] float32."""
        frequencies = self.rotary_pos_emb.inv_freq.to(positions.device)
        angles = torch.outer(positions.to(frequencies.dtype), frequencies)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]

    def _left_out(self, supervised: Tensor | None, input_ids: Tensor) -> Tensor | None:
        """Return [1, s (/ TP)] bool: the tokens that the router's auxiliary loss does not count."""
        if supervised is None or self.config.num_moe_experts is None:
            return None
        left_out = torch.ones(input_ids.shape[1], dtype=torch.bool, device=input_ids.device)
        left_out[supervised] = False
        if self.config.sequence_parallel:
            left_out = scatter_to_sequence_parallel_region(left_out, group=self.pg_collection.tp)
        return left_out[None]

    def _select(self, hidden: Tensor, supervised: Tensor | None) -> Tensor:
        """[s (/ TP), b, hidden] -> [n or s, b, hidden] of the supervised positions, on every TP rank."""
        if self.config.sequence_parallel:  # only a split: the head's own backward pass sums over TP
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return hidden if supervised is None else hidden.index_select(0, supervised)
