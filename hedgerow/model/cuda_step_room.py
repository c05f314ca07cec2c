"""The buffers of the target's steps on a GPU: made once, at fixed addresses, so that a step can be captured."""

from __future__ import annotations

import torch

from hedgerow.model.config import K2Config
from hedgerow.model.cuda_plan import MOST_SEQUENCES
from hedgerow.model.cuda_walk import BACK
from kernels.gpu.int4_moe_gemm import Workspace as Experts
from kernels.gpu.int4_moe_gemm import supports
from kernels.gpu.linear import room_of_parts
from kernels.gpu.mla_tree_attention import Workspace, most_splits
from kernels.gpu.row_layout import DEEPEST


class Room:
    """The buffers of steps of up to `rows` rows. A step of fewer takes the first rows of each. `c`: what one rank
    computes; its logits are of the whole `vocabulary`."""

    def __init__(
        self, c: K2Config, vocabulary: int, taps: int, rows: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.rows = rows
        shared = c.moe_intermediate_size * c.n_shared_experts
        heads, top_k = c.num_attention_heads, c.num_experts_per_tok
        wide = 2 * c.intermediate_size, 2 * shared + c.n_routed_experts

        def room(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(*shape, device=device, dtype=of)

        floats, ints = torch.float32, torch.int32
        self.position, self.slot, self.shared = (room(rows, of=ints) for _ in range(3))
        self.path = room(rows, DEEPEST, of=ints)
        self.x, self.delta = room(rows, c.hidden_size, of=floats), room(rows, c.hidden_size, of=floats)
        self.spare = room(1, c.hidden_size, of=floats)  # a single row's stream stands in x and here by turns
        self.features = room(rows, taps * c.hidden_size, of=floats)
        self.normed = room(rows, c.hidden_size)
        self.a = room(room_of_parts(rows, c.q_lora_rank + c.latent_width, c.hidden_size), of=floats)
        self.query_latent = room(rows, c.q_lora_rank)
        self.query = room(rows, heads, c.qk_nope_head_dim + c.qk_rope_head_dim)
        self.q = room(rows, heads, c.latent_width)
        self.context = room(rows, heads, c.kv_lora_rank)
        # under the interpreter there are none, and `row_attention` serves all rows
        self.states: Workspace | None = None
        if device.type == "cuda":
            splits = most_splits(c.max_position_embeddings)
            self.states = Workspace(rows, heads, c.kv_lora_rank, splits, str(device))
        self.value = room(rows, heads, c.v_head_dim)
        # one product's outputs, a step's experts and all of its logits: of one width each time
        self.gate_up = room(max(room_of_parts(rows, one, c.hidden_size) for one in wide), of=floats)
        self.act = room(rows * max(c.intermediate_size, shared))
        self.chosen, self.weights = room(rows, top_k, of=ints), room(rows, top_k, of=floats)
        self.experts: Experts | None = None
        if supports(c.hidden_size, c.moe_intermediate_size, top_k, device, dtype):
            self.experts = Experts(rows, c.n_routed_experts, device)
        one_by_one = 0 if c.int4_experts and self.experts else rows
        self.pairs = room(c.n_routed_experts * one_by_one, of=ints)
        self.counts = room(c.n_routed_experts, of=ints)
        self.inner = room(one_by_one * top_k, c.moe_intermediate_size)
        self.partials = room(one_by_one, top_k, c.hidden_size, of=floats)
        self.logits = room(rows, vocabulary, of=floats)
        self.walks = room(MOST_SEQUENCES, BACK, of=ints)
