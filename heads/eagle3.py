"""EAGLE-3 (arXiv 2503.01840) and the norms of EAGLE-3.1 (arXiv 2605.09992): one decoder layer over tapped states.

Slot t joins g_t = fc(taps of x_t) with the embedding of x_{t+1} and predicts x_{t+2}. Training unrolls the head K times
on its own output (training-time test): pass k of start t stands at slot t + k, reads the output of pass k - 1 and the
embedding of x_{t+1+k}, sees the true slots up to t and its own column, and predicts x_{t+2+k}. That is what a round of
the served decoder does. This file knows no file format, no sampling rule and no optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from heads.artifact import UserError
from heads.base import Committed, DraftHead, Draw, FeatureNeeds, LossSums, Proposal, TargetFeatures, TargetWeights
from heads.cache import Block, BlockCache
from heads.layers import BlockSizes, DraftBlock, RMSNorm, Rotary, copy_last_layer
from heads.losses import KERNELS, TargetRows, unrolled_loss
from heads.target import FrozenTarget
from heads.tree_draft import Tree, draft_tree
from heads.unrolled import Columns, unrolled_attention
from heads.vocab import DraftVocabulary


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Boundaries (2, L/2, L-3), as servers assume; UserError where they collapse on a shallow target."""
    taps = (2, num_layers // 2, num_layers - 3)
    if not taps[0] < taps[1] < taps[2]:
        raise UserError(
            f"The default taps {list(taps)} are not distinct on a target of {num_layers} layers; "
            f"set head.taps to ascending boundaries below {num_layers}."
        )
    return taps


@dataclass
class Eagle3State:
    """The layer's cache over committed slots, and slots that came in since the last proposal."""

    cache: BlockCache
    pending: list[Committed] = field(default_factory=list)


class Eagle3Head(DraftHead):
    """One decoder layer on fc(taps), with its own final norm and its own projection to the draft vocabulary.

    sizes: of the target's layers; taps: boundary ids (None: `default_taps`); depth: unrolled passes K; decay: weight
    of pass k is decay^k; loss: a key of losses.KERNELS; norm_before_residual: the residual is the normed hidden state;
    fc_norm: RMSNorm on each tapped state; norm_output: the state after the final norm is fed back.
    Raises UserError on taps, depth or loss that cannot be.
    """

    def __init__(
        self,
        *,
        sizes: BlockSizes | Mapping[str, Any],
        vocab: DraftVocabulary,
        taps: Sequence[int] | None = None,
        depth: int = 4,
        decay: float = 0.8,
        loss: str = "kl",
        norm_before_residual: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
    ) -> None:
        sizes = sizes if isinstance(sizes, BlockSizes) else BlockSizes(**sizes)
        needs = FeatureNeeds(taps=tuple(taps) if taps is not None else default_taps(sizes.num_target_layers))
        needs.check(sizes.num_target_layers)
        if loss not in KERNELS or depth < 1:
            raise UserError(
                f"head.loss={loss} head.depth={depth}: the loss is one of {', '.join(KERNELS)}, the depth ≥ 1."
            )
        flags = {"norm_before_residual": norm_before_residual, "fc_norm": fc_norm, "norm_output": norm_output}
        arguments = {
            "sizes": asdict(sizes),
            "taps": list(needs.taps),
            "depth": depth,
            "decay": decay,
            "loss": loss,
            **flags,
        }
        super().__init__(needs=needs, vocab=vocab, arguments=arguments)
        config, width = sizes.llama_config(), sizes.hidden_size
        self.depth, self.decay, self.loss_kind = depth, decay, loss
        self.norm_before_residual, self.norm_output = norm_before_residual, norm_output
        self.fc_norm = nn.ModuleList(RMSNorm(width, config.rms_norm_eps) for _ in needs.taps) if fc_norm else None
        self.fc = nn.Linear(len(needs.taps) * width, width, bias=False)
        self.input_layernorm = RMSNorm(width, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.layer = DraftBlock(config, 2 * width)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, len(vocab.ids_W), bias=False)
        self.rotary = Rotary(config)

    def attach(self, target: TargetWeights) -> None:
        super().attach(target)
        # The target's logits over the draft vocabulary need these rows only.
        self._draftable = [target.over(self.vocab.ids_W)]

    @torch.no_grad()
    def initialise(self, target: FrozenTarget) -> None:
        """Start from the target: the block from its last layer, the norms, and the rows of its vocabulary projection;
        fc hands on the highest tap. What reads the embedding starts small and random."""
        width, std = self.fc.out_features, 0.02
        for projection in (self.layer.self_attn.q_proj, self.layer.self_attn.k_proj, self.layer.self_attn.v_proj):
            projection.weight[:, :width].normal_(0, std)
        gains = copy_last_layer(self.layer, target.model)
        for name, norm in (("input_layernorm", self.hidden_norm), ("norm", self.norm)):
            if name in gains:
                norm.weight.copy_(gains[name])
        self.fc.weight.zero_()
        self.fc.weight[:, -width:] = torch.eye(width)
        self.fc.weight[:, :-width].normal_(0, 1e-3)
        self.lm_head.weight.copy_(target.weights.lm_head_VD[self.vocab.ids_W.to(target.device)])

    # ---- training -------------------------------------------------------------------------------------------------

    def loss(self, features: TargetFeatures) -> LossSums:
        """Unrolled loss over one packed batch; `count` is the number of starts that have anything to predict.

        metrics: `acceptance` is the teacher-forced conditional acceptance by depth (the draft's argmax is the target's
        token, given that it was at all earlier depths); `overlap` is Σ min(p, q); `loss` the loss of each depth.
        """
        starts_N, valid_KN = supervised_pairs(features.supervised_T, features.lengths, self.depth)
        if not len(starts_N):
            nothing = sum((parameter.sum() * 0.0 for parameter in self.parameters()), torch.zeros(()))
            return LossSums(nothing, torch.zeros(()))
        hidden_KND = self._unroll(features, starts_N)
        places_N = starts_N + 1
        target = TargetRows(
            last_ND=features.last_TD[places_N],
            weights=self._draftable[0],
            lse_N=features.lse_T[places_N],
            token_N=self._draft_ids(features.ids_T[places_N + 1]),
        )
        weights_K = self.decay ** torch.arange(self.depth, device=starts_N.device)
        places_KN = _pair_places(starts_N, valid_KN)
        sums = unrolled_loss(hidden_KND, self.lm_head.weight, target, places_KN, weights_K, self.loss_kind)
        count_K = valid_KN.sum(1).float()
        alive_KN = sums.match_KN.cumprod(0).float()
        reached_K = torch.cat([count_K[:1], (alive_KN[:-1] * valid_KN[1:]).sum(1)])
        metrics = {
            "acceptance": (alive_KN.sum(1), reached_K),
            "overlap": (sums.overlap_KN.sum(1).float(), count_K),
            "loss": (sums.loss_K.float(), count_K),
        }
        return LossSums(sums.total, count_K[0], metrics)

    def _unroll(self, features: TargetFeatures, starts_N: Tensor) -> Tensor:
        """States after the final norm [K, N, D] of all passes. Keys and values of pass 0 are made for every slot,
        everything else for the starts only."""
        positions_T = torch.cat([torch.arange(length, device=starts_N.device) for length in features.lengths])
        columns = Columns(features.lengths, starts_N)
        following_T = features.ids_T.roll(-1)  # the last slot of a document gets a wrong token and is never a start
        base_TD = self._combine(features.taps_TE)
        normed_TD = self.hidden_norm(base_TD)
        x_T2 = torch.cat([self.input_layernorm(self._embed(following_T, normed_TD)), normed_TD], dim=-1)
        rope_T = self._rope(x_T2, positions_T)
        base = self.layer.self_attn.keys_values(x_T2, rope_T)
        fed_ND, normed_ND, x_N2 = base_TD[starts_N], normed_TD[starts_N], x_T2[starts_N]
        rope_N = (rope_T[0][starts_N], rope_T[1][starts_N])
        own: list[tuple[Tensor, Tensor]] = []
        outputs = []
        for k in range(self.depth):
            if k > 0:
                place_N = (starts_N + 1 + k).clamp(max=len(features.ids_T) - 1)
                normed_ND = self.hidden_norm(fed_ND)
                embedded_ND = self.input_layernorm(self._embed(features.ids_T[place_N], normed_ND))
                x_N2 = torch.cat([embedded_ND, normed_ND], dim=-1)
                rope_N = self._rope(x_N2, positions_T[starts_N] + k)
                own.append(self.layer.self_attn.keys_values(x_N2, rope_N))
            queries_NHd = self.layer.self_attn.queries(x_N2, rope_N)
            attended_ND = self.layer.self_attn.o_proj(unrolled_attention(queries_NHd, base, own, columns).flatten(1))
            fed_ND, output_ND = self._finish(fed_ND, normed_ND, attended_ND)
            outputs.append(output_ND.to(attended_ND.dtype))
        return torch.stack(outputs)

    # ---- drafting -------------------------------------------------------------------------------------------------

    def start(self, prompts: Sequence[Sequence[int]]) -> Eagle3State:
        return Eagle3State(BlockCache(len(prompts), self.fc.weight.device))

    def commit(self, state: Eagle3State, committed: Committed) -> None:
        assert not state.pending, "a proposal comes between two commits"
        state.pending.append(committed)

    @torch.inference_mode()
    def propose(self, state: Eagle3State, depth: int, draw: Draw) -> Proposal:
        fed_BD, output_BD = self._settle(state)
        settled, rows = list(state.cache.lengths), len(fed_BD)
        ahead_BN = torch.tensor(settled, device=fed_BD.device)[:, None] + torch.arange(depth, device=fed_BD.device)
        tables = self.rotary(fed_BD, ahead_BN)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for step in range(depth):
            if step > 0:
                rope = (tables[0][:, step - 1 : step], tables[1][:, step - 1 : step])
                block = state.cache.place([1] * rows)
                fed_B1D, output_B1D = self._slots(state.cache, tokens[-1][:, None], fed_BD[:, None], block, rope)
                state.cache.keep([1] * rows)
                fed_BD, output_BD = fed_B1D[:, 0], output_B1D[:, 0]
            drafted_BK = torch.stack(tokens, 1) if tokens else None
            index_B, q_BW = draw(self.lm_head(output_BD), drafted_BK=drafted_BK, vocab=self.vocab)
            tokens.append(self.vocab.to_target(index_B))
            if q_BW is not None:
                probs.append(self.vocab.scatter(q_BW))
        state.cache.forget(settled)
        return Proposal.chain(torch.stack(tokens, 1), probs_BNV=torch.stack(probs, 1) if probs else None)

    @torch.inference_mode()
    def propose_tree(self, state: Eagle3State, depth: int, tree: Tree) -> Proposal:
        fed_BD, output_BD = self._settle(state)
        fed_BMD = fed_BD[:, None]

        def step(tokens_BM: Tensor, slots_BM: Tensor, seen_BMS: Tensor, level: int) -> Tensor:
            nonlocal fed_BMD
            hidden_BMD = fed_BMD.gather(1, slots_BM[..., None].expand(-1, -1, fed_BMD.shape[-1]))
            block = state.cache.place_open(seen_BMS, level - 1)
            fed_BMD, output_BMD = self._slots(state.cache, tokens_BM, hidden_BMD, block)
            return self.lm_head(output_BMD)

        proposal = draft_tree(self.lm_head(output_BD), step, self.vocab, tree, depth)
        state.cache.forget(state.cache.lengths)
        return proposal

    def _settle(self, state: Eagle3State) -> tuple[Tensor, Tensor]:
        """Take in the committed slots; returns what the last of each row feeds back [B, D], and its output [B, D]."""
        committed = state.pending.pop()
        counts = [int(count) for count in committed.count_B]
        hidden_BMD = self._combine(committed.taps_BME)
        block = state.cache.place(counts)
        fed_BMD, output_BMD = self._slots(state.cache, committed.next_ids_BM, hidden_BMD, block)
        state.cache.keep(counts)
        last_B = torch.tensor(counts, device=hidden_BMD.device) - 1
        each_B = torch.arange(len(counts), device=hidden_BMD.device)
        return fed_BMD[each_B, last_B], output_BMD[each_B, last_B]

    def _slots(
        self,
        cache: BlockCache,
        next_ids_BM: Tensor,
        hidden_BMD: Tensor,
        block: Block,
        rope: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The layer over a block of new slots, appended to the cache: (what is fed back, state after the norm).

        rope: cos and sin of the slots' positions, where they are known already.
        """
        normed_BMD = self.hidden_norm(hidden_BMD)
        x_BM2 = torch.cat([self.input_layernorm(self._embed(next_ids_BM, normed_BMD)), normed_BMD], dim=-1)
        rope = rope if rope is not None else self.rotary(x_BM2, block.positions_BN)
        attended_BMD = self.layer.self_attn.cached(x_BM2, rope, cache, block.allowed_BNC)
        return self._finish(hidden_BMD, normed_BMD, attended_BMD)

    # ---- both -----------------------------------------------------------------------------------------------------

    def _combine(self, taps: Tensor) -> Tensor:
        """g = fc(taps), each tapped state normed first if the head has fc_norm."""
        if self.fc_norm is not None:
            parts = taps.chunk(len(self.needs.taps), dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(taps if torch.is_autocast_enabled(taps.device.type) else taps.to(self.fc.weight.dtype))

    def _embed(self, ids: Tensor, like: Tensor) -> Tensor:
        return self.target.embedding_VD[ids].to(like.dtype)

    def _finish(self, hidden: Tensor, normed: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """(what the next pass is fed, the state after the final norm)."""
        plain = self.layer.finish(normed if self.norm_before_residual else hidden, attended)
        output = self.norm(plain)
        return (output if self.norm_output else plain), output

    def _rope(self, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [N, head_dim] for packed positions [N]."""
        cos, sin = self.rotary(states, positions[None])
        return cos[0], sin[0]

    def _draft_ids(self, ids: Tensor) -> Tensor:
        """Draft ids of target ids, -1 where the draft cannot propose them."""
        table_V = torch.full((self.vocab.size,), -1, dtype=torch.long, device=ids.device)
        table_V[self.vocab.ids_W.to(ids.device)] = torch.arange(len(self.vocab.ids_W), device=ids.device)
        return table_V[ids]


def supervised_pairs(supervised_T: Tensor, lengths: Sequence[int], depth: int) -> tuple[Tensor, Tensor]:
    """Which (start, pass) pairs of a packed batch are trained: starts_N ascending and valid_KN.

    A round of the decoder starts at slot t when x_{t+1} has just been written by the target; its pass k predicts
    x_{t+2+k}. So the pair counts when x_{t+1} … x_{t+2+k} were all written by the target, in one turn of one document.
    """
    total = len(supervised_T)
    ends_T = torch.repeat_interleave(torch.tensor(lengths).cumsum(0), torch.tensor(lengths)).to(supervised_T.device)
    slot_T = torch.arange(total, device=supervised_T.device)

    def written(offset: int) -> Tensor:
        inside_T = slot_T + offset < ends_T
        return inside_T & supervised_T[(slot_T + offset).clamp(max=total - 1)]

    alive_T = written(1)
    passes = []
    for k in range(depth):
        alive_T = alive_T & written(2 + k)
        passes.append(alive_T)
    starts_N = passes[0].nonzero()[:, 0]
    return starts_N, torch.stack(passes)[:, starts_N]


def _pair_places(starts_N: Tensor, valid_KN: Tensor) -> Tensor:
    """valid_KN, checked: pass k of start n must find its place at row n + k of the starts, as the loss assumes."""
    for k in range(1, len(valid_KN)):
        pairs = valid_KN[k].nonzero()[:, 0]
        assert torch.equal(starts_N[pairs + k], starts_N[pairs] + k)
    return valid_KN
