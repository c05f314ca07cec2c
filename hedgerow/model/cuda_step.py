"""One forward pass of the target on a GPU: every op of a step over fixed buffers, so that it can be captured whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from hedgerow.model.config import K2Config
from hedgerow.model.cuda_plan import MOST_SEQUENCES, Fields, Shape
from hedgerow.model.cuda_step_room import Room
from hedgerow.model.cuda_walk import read_laws, walk
from hedgerow.model.cuda_weights import CudaLayer, Packed, Plain, SparseMlp
from kernels.gpu.absorb import absorb
from kernels.gpu.add_rmsnorm import add_rmsnorm
from kernels.gpu.int4_moe import int4_moe
from kernels.gpu.int4_moe_gemm import OrderedExperts, closes_shared, products
from kernels.gpu.kv_compact import kv_compact
from kernels.gpu.linear import linear, linear_parts
from kernels.gpu.linear_activated import activated_for, multiply_activated
from kernels.gpu.linear_normed import linear_parts_normed, normed_for
from kernels.gpu.mla_tree_attention import mla_tree_attention
from kernels.gpu.moe_pack import Ordered
from kernels.gpu.plain_moe import plain_moe
from kernels.gpu.rope import mla_inputs
from kernels.gpu.route_silu import route_silu
from kernels.gpu.router import expert_lists, route
from kernels.gpu.row_attention import row_attention
from kernels.gpu.row_layout import PAGE, row_layout
from kernels.gpu.silu_mul import silu_mul
from kernels.gpu.tree_mask import TreeMask, tree_mask


class Weights(NamedTuple):
    """All of the model."""

    embedding: torch.Tensor  # [vocabulary, hidden]
    layers: list[CudaLayer]
    norm: torch.Tensor
    head: torch.Tensor  # [vocabulary, hidden]
    cos: torch.Tensor  # [positions, rope / 2] float32
    sin: torch.Tensor


class Gated(NamedTuple):
    """What is to be activated, and where to."""

    parts: torch.Tensor  # [parts, rows, gate | up | ..]
    act: torch.Tensor


class Owed(NamedTuple):
    """The end of a block that the next product's launch makes."""

    norm: torch.Tensor
    tap: torch.Tensor | None


class CudaStep:
    """The pass over one shape of step. `fields` are the step's block on the device."""

    def __init__(
        self,
        c: K2Config,
        weights: Weights,
        taps: tuple[int, ...],
        eps: float,
        room: Room,
        shape: Shape,
        fields: Fields[torch.Tensor],
    ) -> None:
        self.c, self.weights, self.taps, self.latent_eps = c, weights, taps, eps
        self.room, self.shape, self.fields = room, shape, fields
        # the residual stream, where its next state may stand, and an end of a block that is still to be made
        self.x, self.spare = room.x[: shape.rows], room.spare
        self.owed: Owed | None = None

    def run(self, cache: torch.Tensor, tapped: Callable[[], None] | None = None) -> None:
        """Computes all rows; cache [layers, slots, width]. Results are in the room: `logits`, `features`, `walks`.
        `tapped` is called where the last of the features are made."""
        c, room, f, n = self.c, self.room, self.fields, self.shape.rows
        where = room.position[:n], room.slot[:n], room.shared[:n], room.path[:n]
        row_layout(f.parents, f.seq, f.first, f.prefix, f.chain, f.pages, *where)
        masks = tree_mask(f.parents, self.starts)
        self.x, self.spare, self.owed = room.x[:n], room.spare, None
        x, normed, routed = self.x, room.normed[:n], None
        for number, layer in enumerate(self.weights.layers):
            w = layer.attention_norm
            if number == 0:
                add_rmsnorm(x, w, normed, c.rms_norm_eps, tokens=f.tokens, table=self.weights.embedding)
            else:
                self.leave(number - 1, w, routed, tapped, layer.qkv_a)
            self.attend(number, cache[number], masks)
            mlp = layer.mlp
            self.close(layer.mlp_norm, behind=mlp.shared_router if isinstance(mlp, SparseMlp) else None)
            routed = self.feed(number)
        self.leave(len(self.weights.layers) - 1, self.weights.norm, routed, tapped)
        if self.shape.wanted:
            self.head(room.logits[: self.shape.wanted])
        if self.shape.whole:
            trees, first = min(self.shape.sequences, MOST_SEQUENCES), self.shape.wanted  # rows of trees: those before
            laws, starts, walks = read_laws(f.laws, trees), f.starts[: trees + 1], room.walks[:trees]
            drawn = TreeMask(masks.mask[:first], masks.depth[:first])
            walked = walk(room.logits[:first], f.parents[:first], f.tokens[:first], drawn, starts, laws, walks)
            kv_compact(cache, where[1], starts, walked.path, walked.length)

    @property
    def starts(self) -> torch.Tensor:
        """First rows of all that attention takes for sequences, prompts' chunks too."""
        return self.fields.chunks if self.shape.prompt else self.fields.starts

    def leave(
        self,
        layer: int,
        w: torch.Tensor,
        routed: torch.Tensor | None,
        tapped: Callable[[], None] | None,
        behind: torch.Tensor | None = None,
    ) -> None:
        """Ends layer `layer`; `w` is the norm that comes next, `behind` the product."""
        last = tapped is not None and layer == max(self.taps, default=-1)
        self.close(w, routed, self.tap(layer), None if last else behind)
        if tapped and last:
            tapped()

    def tap(self, layer: int) -> torch.Tensor | None:
        """Where the drafter's features after `layer` go."""
        if layer not in self.taps:
            return None
        begin = self.taps.index(layer) * self.c.hidden_size
        return self.room.features[: self.shape.rows, begin : begin + self.c.hidden_size]

    def attend(self, number: int, cache: torch.Tensor, masks: TreeMask) -> None:
        """What layer `number`'s attention adds, for `close`."""
        self.attention(self.weights.layers[number], cache, masks, self.room.delta[: self.shape.rows])

    def feed(self, number: int) -> torch.Tensor | None:
        """What its feed-forward block adds, the same way; of routed experts, what `close` is given."""
        return self.mlp(number, self.weights.layers[number], self.room.delta[: self.shape.rows])

    def close(
        self,
        w: torch.Tensor,
        routed: torch.Tensor | None = None,
        tap: torch.Tensor | None = None,
        behind: torch.Tensor | None = None,
    ) -> None:
        """Ends a block: the residual stream, and the next one's input, by norm `w`. Or leaves that to `product`, where
        there is one launch for it and for the product with `behind`; or lets that product's launch begin beside it. In
        front of lm_head that costs more than it brings: many programs would find places while some are still taken."""
        room, n = self.room, self.shape.rows
        if behind is not None and routed is None and normed_for(behind, n):
            self.owed = Owed(w, tap)
            return
        normed, delta = room.normed[:n], room.delta[:n]
        add_rmsnorm(
            self.x, w, normed, self.c.rms_norm_eps, delta=delta, partials=routed, tap=tap, early=True,
            eager=behind is not None,
        )  # fmt: skip

    def product(self, w: torch.Tensor, parts: torch.Tensor, kept: bool = False) -> torch.Tensor:
        """The block's input times w, in the memory of `parts`; `kept`: the input is in `normed` then, as always where
        `close` made it."""
        room, n, owed = self.room, self.shape.rows, self.owed
        if owed is None:
            return linear_parts(room.normed[:n], w, parts, eager=True)
        x, self.x, self.spare, self.owed = self.x, self.spare, self.x, None
        normed, eps = room.normed[:n] if kept else None, self.c.rms_norm_eps
        return linear_parts_normed(x, room.delta[:n], owed.norm, w, parts, self.x, eps, kept=normed, tap=owed.tap)

    def head(self, logits: torch.Tensor) -> None:
        linear(self.room.normed[: self.shape.rows], self.weights.head, logits, self.fields.wanted)

    def attention(self, layer: CudaLayer, cache: torch.Tensor, masks: TreeMask, given: torch.Tensor) -> None:
        """Attn(normed) into `given`; the rows' latents go into the cache. The softmax scale is in the queries."""
        c, room, f, n = self.c, self.room, self.fields, self.shape.rows
        position, slot, w = room.position[:n], room.slot[:n], self.weights
        latent, query, q = room.query_latent[:n], room.query[:n], room.q[:n]
        a = self.product(layer.qkv_a, room.a)
        norms = layer.q_norm, layer.kv_norm, self.latent_eps
        mla_inputs(a, *norms, position, slot, w.cos, w.sin, cache, latent, early=True)
        linear(latent, layer.q_b, query.flatten(1), eager=True)
        absorb(query, layer.uk, position, w.cos, w.sin, q, c.softmax_scale, early=True)
        context, value = room.context[:n], room.value[:n]
        if room.states is None:
            row_attention(q, cache, position, room.shared[:n], f.seq, f.pages, room.path[:n], context, 1.0)
        else:
            trees = (f.pages, f.prefix, self.starts, masks.mask, f.widths)
            mla_tree_attention(q, cache.view(-1, PAGE, c.latent_width), *trees, context, room.states, early=True)
        linear(context, layer.uv, value, eager=True)
        linear(value.flatten(1), layer.o, given)

    def mlp(self, number: int, layer: CudaLayer, given: torch.Tensor) -> torch.Tensor | None:
        """MLP(normed) into `given`; or the shared expert's into `delta`, and the routed experts' is given back."""
        c, room, n, w = self.c, self.room, self.shape.rows, layer.mlp
        normed, delta = room.normed[:n], room.delta[:n]
        if not isinstance(w, SparseMlp):
            self.swiglu(w.gate_up, w.down, given)
            return None
        chosen, weights, width = room.chosen[:n], room.weights[:n], w.shared_down.shape[1]
        parts = self.product(w.shared_router, room.gate_up, kept=True)
        act = None if activated_for(w.shared_down, n) else room.act[: n * width].view(-1, width)
        self.choose(number, parts[..., 2 * width :], w.bias, None if act is None else Gated(parts, act))
        if room.experts and isinstance(w.gate_up, Ordered) and isinstance(w.down, Ordered):
            experts, tiles = OrderedExperts(w.gate_up, w.down), room.experts.tiles(chosen)
            rest = normed, chosen, weights, experts, tiles, room.experts, given
            if act is not None and closes_shared(n):
                products(*rest, shared=(act, w.shared_down))
                return None
            # the routing is older than this launch, so the routed experts' first product runs beside it
            self.shared(parts, act, w.shared_down, delta)
            products(*rest, delta, settled=True)
            return None
        self.shared(parts, act, w.shared_down, delta)
        pairs = room.pairs[: c.n_routed_experts * n].view(c.n_routed_experts, n)
        expert_lists(chosen, pairs, room.counts)
        inner, partials = room.inner[: n * c.num_experts_per_tok], room.partials[:n]
        if isinstance(w.gate_up, Packed) and isinstance(w.down, Packed):
            int4_moe(normed, weights, pairs, room.counts, w.gate_up, w.down, inner, partials)
        elif isinstance(w.gate_up, Plain) and isinstance(w.down, Plain):
            plain_moe(normed, weights, pairs, room.counts, w.gate_up, w.down, inner, partials)
        return partials

    def choose(self, number: int, logits: torch.Tensor, bias: torch.Tensor, gated: Gated | None) -> None:
        """Each row's experts in layer `number`, and their weights, of logits [parts, rows, experts]; beside it what is
        gated is activated."""
        c, room, n = self.c, self.room, self.shape.rows
        law = c.norm_topk_prob, c.routed_scaling_factor
        given = logits, bias, room.slot[:n], room.chosen[:n], room.weights[:n]
        if gated:
            route_silu(*given, *law, *gated)
        else:
            route(*given, *law)

    def shared(self, parts: torch.Tensor, act: torch.Tensor | None, down: torch.Tensor, given: torch.Tensor) -> None:
        """The shared expert's last product, of what was activated, or of parts older than the launch before."""
        if act is None:
            multiply_activated(parts, down, given, early=True)
        else:
            linear(act, down, given)

    def swiglu(self, gate_up: torch.Tensor, down: torch.Tensor, given: torch.Tensor) -> None:
        """down(silu(gate) * up) of `normed` into `given`."""
        parts = linear_parts(self.room.normed[: self.shape.rows], gate_up, self.room.gate_up)
        act = self.room.act[: self.shape.rows * down.shape[1]].view(-1, down.shape[1])
        silu_mul(parts, act)
        linear(act, down, given)
