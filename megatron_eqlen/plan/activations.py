"""Bytes that autograd keeps for the backward pass of one row, and the temporary memory of the pass.

The terms follow the modules' code tensor by tensor (``models/layer_specs.py`` lists a layer's). Four kinds of
module save different tensors on a GPU and on a CPU: Transformer Engine's norms keep their input in the
model's dtype where plain torch keeps two float32 copies, its products are fused, the delta rule is fla's, and
FlexAttention's output is copied into another order. Tests check CPU counts on real models. Rows are full.

b: bytes of a number in the model's dtype. wide: bytes of a number in at least float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_eqlen.hf.adapter_map import adapter_map
from megatron_eqlen.hf.config import DeltaNet, ModelConfig
from megatron_eqlen.job import Job
from megatron_eqlen.recipe import LoraRecipe, ParallelRecipe, layout

BYTES = {"float32": 4, "bfloat16": 2}
WIDE = 4
CPU_CHUNK = 32
"""``models.gated_delta_net.CHUNK``."""
FLA_CHUNK = 64
"""``models.tree_params.KERNEL_CHUNK``: fla saves a triangular matrix of each chunk."""
LOSS_BLOCK, CPU_LOSS_BLOCK = 1 << 27, 1 << 20
"""Bytes of ``training.logprobs.BLOCK_ELEMENTS`` and of ``CPU_ELEMENTS`` in float32."""
ROUTING_IMBALANCE = 1.25
"""Tokens at the busiest expert-parallel rank over the mean; an allowance."""


@dataclass(frozen=True)
class Activations:
    """Bytes of one rank of one pipeline stage, at the moment that needs most."""

    kept: float
    """Saved by the forward passes of all rows in flight, until their backward passes."""
    layer: float
    """Saved by the recomputed part of one layer."""
    head: float
    """Saved by the final norm and the language-model head of the last stage."""
    loss: float
    """Needed by the language-model head and the loss of the last stage, beyond ``head``."""
    passing: float
    """Gradients, gathered inputs and dispatched tokens of one layer; an estimate."""

    @property
    def peak(self) -> float:
        return self.kept + max(self.layer + self.passing, self.head + self.loss)


def activations(
    job: Job,
    stage: int,
    *,
    sequence: bool,
    gpu: bool = True,
    imbalance: float = ROUTING_IMBALANCE,
    rows: int | None = None,
) -> Activations:
    """Return the activation memory of pipeline stage ``stage``. ``sequence``: sequence parallelism is on.
    ``rows``: rows per data-parallel rank and minibatch; None: enough to fill the pipeline."""
    recipe, model, parallel = job.recipe, job.model, job.recipe.parallel
    tokens, width = recipe.packing.max_tokens_per_row, BYTES[recipe.model.dtype]
    row = RankRow(model, parallel, tokens, width, sequence, gpu, recipe.lora, imbalance)
    chunks = layout.stages(parallel, model)[stage :: parallel.pipeline]
    layers = [number for chunk in chunks for number in chunk]
    # forward passes through all layers of this stage that still await their backward pass
    under_way = _under_way(parallel, stage, rows) / len(chunks)
    boundary = row.boundary if parallel.pipeline > 1 else 0.0  # a stage's output waits for its gradient
    again = [row.recomputed(number) for number in layers]
    of_layers = sum(map(row.layer, layers)) - sum(again)
    last = stage == parallel.pipeline - 1
    return Activations(
        kept=under_way * (of_layers + boundary * len(chunks)),
        layer=max(again) + row.boundary if parallel.recompute == "full" else max(again),
        head=row.head(recipe.packing.logits_chunk) if last else 0.0,
        loss=row.loss(recipe.packing.logits_chunk) if last else 0.0,
        passing=max(map(row.passing, layers)),
    )


def _under_way(parallel: ParallelRecipe, stage: int, rows: int | None) -> int:
    """Return the most chunks that await their backward pass: the warm-up of Megatron's schedules plus one."""
    pipeline, virtual = parallel.pipeline, parallel.virtual_pipeline
    most = 2 * (pipeline - stage - 1) + (virtual - 1) * pipeline + 1 if virtual else pipeline - stage
    return most if rows is None else min(most, rows * (virtual or 1))


@dataclass(frozen=True)
class RankRow:
    """The ``tokens`` of a row."""

    model: ModelConfig
    parallel: ParallelRecipe
    tokens: int
    b: int
    sequence: bool
    gpu: bool
    lora: LoraRecipe
    imbalance: float

    @property
    def fused(self) -> bool:
        fusions = self.parallel.fusions
        return self.gpu if fusions is None else fusions

    @cached_property
    def shard(self) -> float:
        """Tokens per rank between the tensor-parallel parts."""
        return self.tokens / self.parallel.tensor if self.sequence else self.tokens

    @cached_property
    def boundary(self) -> float:
        """Bytes of the hidden states between two layers."""
        return self.shard * self.model.hidden_size * self.b

    def layer(self, number: int) -> float:
        """Return the bytes that autograd keeps for one layer."""
        net = self.model.delta_net
        mixer = self._delta_net(net) if net and net.layers[number] else self._attention()
        mlp = self._mlp(number)
        norms = 2 * self._norm(self.shard, self.model.hidden_size)
        adapters = self._adapters(number) if self.lora.rank else 0.0
        return norms + 2 * self.boundary + mixer + mlp + adapters  # a norm's output is a linear's input

    def recomputed(self, number: int) -> float:
        """Return the bytes of one layer that its backward pass computes again instead."""
        if self.parallel.recompute == "full":
            return self.layer(number) - self.boundary
        if self.parallel.recompute == "none":
            return 0.0
        return self._mlp(number) + self._norm(self.shard, self.model.hidden_size)

    def _mlp(self, number: int) -> float:
        experts = self.model.experts
        sparse = experts is not None and experts.layers[number]
        return self._experts() if sparse else self._gated_mlp(self.model.intermediate_size)

    def _adapters(self, number: int) -> float:
        """Return the bytes between A and B; a layer's input is kept for its weight's gradient otherwise."""
        bytes_per_row, total = self.b * self.lora.rank, 0.0
        for adapter in adapter_map(self.model, self.lora.rank, self.lora.targets):
            if adapter.base.megatron.startswith(f"decoder.layers.{number}.") and not adapter.base.expert:
                routed = adapter.base.expert is not None
                # Rows of A's output: routed tokens, a rank's shard (layers divided by columns), or the whole.
                rows = self._routed() if routed else self.shard if adapter.base.dim else self.tokens
                total += bytes_per_row * rows
        return total

    def passing(self, number: int) -> float:
        """Return the temporary bytes of one layer: the gradients of its widest part and, with sequence
        parallelism, a linear layer's input for the whole row with its gradient."""
        whole = 2 * self.tokens * self.model.hidden_size * self.b if self.sequence else 0.0
        experts, net = self.model.experts, self.model.delta_net
        if experts and experts.layers[number]:
            routed = self._routed()
            width = experts.moe_intermediate_size / self.parallel.expert_tensor
            mlp = routed * self.b * (3 * self.model.hidden_size + 4 * width)  # sent, received, their gradient
        else:
            mlp = 4 * self.tokens * self.b * self.model.intermediate_size / self.parallel.tensor
        mixer = self._rule_passing(net) if net and net.layers[number] else 0.0
        return whole + max(mlp, mixer)

    def _rule_passing(self, net: DeltaNet) -> float:
        """Return the delta rule's temporary bytes. fla's backward makes w, u, states, their gradients and
        those of q, k, v; plain torch copies q and k for all value heads in float32, with gradients."""
        key, value = net.key_head_dim, net.value_head_dim
        states = 2 * key * value / FLA_CHUNK
        fla = self.b * (6 * key + 4 * value + states)
        plain = WIDE * (4 * key + 2 * value)
        return self.tokens * net.num_value_heads / self.parallel.tensor * (fla if self.gpu else plain)

    def head(self, chunk: int) -> float:
        """Return the bytes kept by the final norm, the head's input, and the logits of a row that is one
        chunk (training/head.py). All tokens are assumed to be supervised."""
        hidden = self.model.hidden_size
        logits = self._logits(self.tokens) if self.tokens <= chunk else 0.0
        return self._norm(self.shard, hidden) + self.tokens * hidden * self.b + logits

    def loss(self, chunk: int) -> float:
        """Return the temporary bytes beyond ``head``: forward a chunk's logits with two float32 blocks,
        backward the gradient of the logits with a block, then with those of the head's weight and input."""
        hidden = self.model.hidden_size
        logits = self._logits(min(self.tokens, chunk))
        # the same logits in float32, a block at a time
        block = min(LOSS_BLOCK if self.gpu else CPU_LOSS_BLOCK, logits * WIDE / self.b)
        # [V, hidden] / tensor of the head's weight, and [tokens, hidden] of its input
        gradients = self._logits(hidden) + self.tokens * hidden * self.b
        recomputed = logits if self.tokens > chunk else 0.0
        return recomputed + max(2 * block, logits + max(block, gradients))

    def _logits(self, tokens: int) -> float:
        return tokens * self.b * self.model.vocab_size / self.parallel.tensor

    def _norm(self, rows: float, width: float, heads: float = 1, input_is_kept: bool = False) -> float:
        """Return the bytes of an RMSNorm over ``heads`` groups in each row, without its output."""
        if self.gpu:
            return rows * (self.b * width + WIDE * heads)
        return self._plain_norm(rows, width, heads, input_is_kept)

    def _plain_norm(self, rows: float, width: float, heads: float, input_is_kept: bool = False) -> float:
        if self.b < WIDE and not self.gpu:
            return rows * self.b * width * (not input_is_kept)
        frozen = self.lora.rank > 0  # the norm's weight needs no copy for its gradient
        copies = 2 - (input_is_kept and self.b == WIDE) - frozen
        return rows * WIDE * (copies * width + heads)

    def _attention(self) -> float:
        model, tensor = self.model, self.parallel.tensor
        # Numbers per token on one rank: queries, and keys (as many as values).
        query = model.num_attention_heads * model.head_dim / tensor
        key = model.num_key_value_heads * model.head_dim / tensor
        heads, groups = model.num_attention_heads / tensor, model.num_key_value_heads / tensor
        projected = query * (2 if model.gated_attention else 1) + 2 * key
        rotary = 4 * model.head_dim * model.partial_rotary_factor
        rotated, output = query + key, query * (2 if self.gpu else 1)
        kept = self.b * (projected + rotary + rotated + output)  # the values are a view of the projection
        kept += WIDE * heads  # log-sum-exp
        if model.gated_attention:
            kept += query * (self.b + WIDE)
        if not model.qk_norm:
            return self.tokens * kept
        norms = self._norm(self.tokens, query, heads) + self._norm(self.tokens, key, groups, True)
        return self.tokens * kept + norms

    def _gated_mlp(self, width: int) -> float:
        """Return the bytes of gate|up, silu(gate), up (not if fused) and their product, without the norm."""
        return self.tokens * self.b * (3 if self.fused else 5) * width / self.parallel.tensor

    def _experts(self) -> float:
        experts = self.model.experts
        assert experts is not None
        router = self.shard * (5 * experts.num_experts + 20 * experts.num_experts_per_tok)
        width = (4 if self.fused else 6) * experts.moe_intermediate_size / self.parallel.expert_tensor
        routed = self._routed() * (self.b * (self.model.hidden_size + width) + WIDE)
        if not experts.shared_expert_intermediate_size:
            return router + routed
        shared = self._gated_mlp(experts.shared_expert_intermediate_size)
        return router + routed + shared + self.boundary + self.shard * self.b

    def _routed(self) -> float:
        """Return the number of tokens routed to this rank's experts."""
        experts, parallel = self.model.experts, self.parallel
        assert experts is not None
        busiest = self.imbalance if parallel.expert > 1 else 1.0
        return self.shard * experts.num_experts_per_tok * parallel.expert_tensor * busiest

    def _delta_net(self, net: DeltaNet) -> float:
        tensor = self.parallel.tensor
        heads = net.num_value_heads / tensor
        keys, values = net.num_key_heads * net.key_head_dim / tensor, heads * net.value_head_dim
        mixed = 2 * keys + values
        kept = self.b * 2 * mixed + heads * (self.b + 2 * WIDE)  # the convolution and its output; beta, decay
        kept += WIDE * 2 * (keys + net.num_key_heads / tensor) if self.b < WIDE else WIDE * mixed
        kept += values * (WIDE + 3 * self.b)  # the gate, its silu, the normed output, their product
        rule = self._fla_rule if self.gpu else self._plain_rule
        return self.tokens * (kept + rule(net, heads)) + self._plain_norm(self.tokens, values, heads)

    def _plain_rule(self, net: DeltaNet, heads: float) -> float:
        """Return the bytes per token of ``chunked_delta_rule``: five matrices a chunk; q, k, v in float32."""
        key, value = net.key_head_dim, net.value_head_dim
        return heads * WIDE * (5 * CPU_CHUNK + 12 * key + 4 * value + key * value / CPU_CHUNK)

    def _fla_rule(self, net: DeltaNet, heads: float) -> float:
        """Return the bytes per token of q, k, v, chunks' triangles, decay, beta, and the unordered output."""
        keys = net.num_key_heads * net.key_head_dim / self.parallel.tensor
        return self.b * 2 * keys + heads * (self.b * (2 * net.value_head_dim + FLA_CHUNK) + WIDE + self.b)
