"""K MTP modules in a row for a dense target: DeepSeek-V3 (arXiv 2412.19437, section 2.2), each depth its own block.

Slot t of module k (from 0) joins what module k - 1 made of slot t (module 0: f_t, the target's state after its final
norm) with the embedding of x_{t+1+k}, sees its own slots up to t, and predicts x_{t+2+k}. A slot of module k lies at
rope position t + k, where its token's own slot is, so that all modules share one cache: column p of module k holds slot
p - k, and its first k columns hold nothing and are never seen. Every slot reads true tokens: in training all of them,
in drafting all that are settled; the k newest of module k read drafted tokens, and are made anew in each round. This
file knows no file format, no sampling rule and no optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from heads.base import Committed, Draw, FeatureNeeds, LossSums, Proposal, TargetFeatures
from heads.cache import Block, BlockCache
from heads.compiled import compiled
from heads.layers import BlockSizes, Rotary
from heads.mtp_module import MTPModule
from heads.pairs import PairHead
from heads.target import FrozenTarget
from heads.tree_draft import Tree, draft_tree
from heads.unrolled import Columns, fused_attention, unrolled_attention
from heads.vocab import DraftVocabulary


@dataclass
class BlocksState:
    """The modules' cache over committed columns, what each made of its newest one [B, D], and committed slots that
    came in since the last proposal."""

    cache: BlockCache
    newest: list[Tensor] = field(default_factory=list)
    pending: list[Committed] = field(default_factory=list)


class MTPBlocksHead(PairHead):
    """`depth` modules with their norms, with the target's embeddings and projection; it drafts no deeper.

    sizes: of the target's layers; depth: modules K; loss, decay, eta: see heads.losses.Objective. Raises UserError on
    values that cannot be.
    """

    flex = False

    def __init__(
        self,
        *,
        sizes: BlockSizes | Mapping[str, Any],
        vocab: DraftVocabulary,
        depth: int = 4,
        loss: str = "kl",
        decay: float | str = 0.8,
        eta: float = 3.0,
    ) -> None:
        sizes = sizes if isinstance(sizes, BlockSizes) else BlockSizes(**sizes)
        own = {"sizes": asdict(sizes)}
        super().__init__(needs=FeatureNeeds(), vocab=vocab, depth=depth, loss=loss, decay=decay, eta=eta, own=own)
        self.longest = depth
        self.blocks = nn.ModuleList(MTPModule.of(sizes, final_norm=True) for _ in range(depth))
        self.rotary = Rotary(sizes.llama_config())

    def initialise(self, target: FrozenTarget) -> None:
        """Each module starts as one more layer of the target (see heads.mtp_module)."""
        for module in self.modules_in_order:
            module.start_as_layer(target)

    @property
    def modules_in_order(self) -> list[MTPModule]:
        """Module 0 first."""
        return [module for module in self.blocks if isinstance(module, MTPModule)]

    def logits(self, output: Tensor) -> Tensor:
        """By the target's own projection."""
        return self.draftable.read(output)

    # ---- training -------------------------------------------------------------------------------------------------

    def loss(self, features: TargetFeatures) -> LossSums:
        """Every module at every start over one packed batch (see heads.pairs.summed)."""
        return self.learn(features, lambda starts_N: self.unroll(features, starts_N, self.depth))

    def unroll(self, features: TargetFeatures, starts_N: Tensor, depth: int) -> Tensor:
        """What the first `depth` modules make of the starts [depth, N, D]; zero where a document has no such slot.

        Module k runs every slot whose token x_{t+1+k} is there: those of a document but its last 1 + k.
        """
        place_T = torch.cat([torch.arange(length, device=starts_N.device) for length in features.lengths])
        length_T = torch.repeat_interleave(
            torch.tensor(features.lengths, device=starts_N.device), torch.tensor(features.lengths).to(starts_N.device)
        )
        before_T = torch.ones_like(place_T, dtype=torch.bool)
        states_SD, outputs = self._given(features.last_TD), []
        for k, module in enumerate(self.modules_in_order[:depth]):
            there_T = place_T < length_T - 1 - k
            states_SD = states_SD[there_T[before_T]]
            slots_S = there_T.nonzero()[:, 0]
            tokens_S, positions_S = features.ids_T[slots_S + 1 + k], place_T[slots_S] + k
            lengths = tuple(length - 1 - k for length in features.lengths if length > 1 + k)
            states_SD = self._whole(module, tokens_S, states_SD, positions_S, lengths)
            row_T = torch.full_like(place_T, len(slots_S)).masked_scatter(
                there_T, torch.arange(len(slots_S), device=place_T.device)
            )
            outputs.append(torch.cat([states_SD, states_SD.new_zeros(1, states_SD.shape[-1])])[row_T[starts_N]])
            before_T = there_T
        return torch.stack([output.to(outputs[0].dtype) for output in outputs])

    def _whole(
        self, module: MTPModule, tokens_S: Tensor, states_SD: Tensor, positions_S: Tensor, lengths: tuple[int, ...]
    ) -> Tensor:
        """A module over all slots of packed documents, each of which sees those of its document up to itself."""
        enter, leave = compiled(_enter, self.compiled), compiled(_leave, self.compiled)
        rope = tuple(table[0] for table in self.rotary(self.rotary.inv_freq, positions_S[None]))
        residual_SD, queries_SHd, *base = enter(module, self._embed(tokens_S, states_SD), states_SD, positions_S, rope)
        columns = Columns(lengths, torch.arange(len(tokens_S), device=tokens_S.device))
        attend = fused_attention if self.flex else unrolled_attention
        made_SD: Tensor = leave(module, residual_SD, attend(queries_SHd, (base[0], base[1]), [], columns))
        return made_SD

    def _given(self, last: Tensor) -> Tensor:
        """f as it is."""
        weight = self.modules_in_order[0].proj.weight
        return last if torch.is_autocast_enabled(last.device.type) else last.to(weight.dtype)

    def _embed(self, ids: Tensor, like: Tensor) -> Tensor:
        """The target's embeddings of tokens, in the dtype of other states."""
        return self.target.embedding_VD[ids].to(like.dtype)

    # ---- drafting -------------------------------------------------------------------------------------------------

    def start(self, prompts: Sequence[Sequence[int]]) -> BlocksState:
        return BlocksState(BlockCache(len(prompts), self.modules_in_order[0].proj.weight.device))

    def commit(self, state: BlocksState, committed: Committed) -> None:
        assert not state.pending, "a proposal comes between two commits"
        state.pending.append(committed)

    @torch.inference_mode()
    def propose(self, state: BlocksState, depth: int, draw: Draw) -> Proposal:
        self._settle(state)
        drafted_BMkD = state.newest[0][:, None, None, :][:, :, :0]

        def step(tokens: Sequence[Tensor]) -> Tensor:
            nonlocal drafted_BMkD
            if not tokens:
                return self.logits(state.newest[0])
            drafted_BMkD = self._ahead(state, torch.stack(list(tokens), 1)[:, None], drafted_BMkD)
            return self.logits(drafted_BMkD[:, 0, -1])

        return self.chain(step, depth, draw)

    @torch.inference_mode()
    def propose_tree(self, state: BlocksState, depth: int, tree: Tree) -> Proposal:
        """A module runs the drafted slots of each path by themselves, those that paths share too: there are few."""
        self._settle(state)
        drafted_BMkD = state.newest[0][:, None, None, :][:, :, :0]
        paths_BMk = torch.zeros(drafted_BMkD.shape[:3], dtype=torch.long, device=drafted_BMkD.device)

        def step(tokens_BM: Tensor, slots_BM: Tensor, seen_BMS: Tensor, level: int) -> Tensor:
            nonlocal drafted_BMkD, paths_BMk
            above_BM1 = slots_BM[..., None].expand(-1, -1, paths_BMk.shape[2])
            paths_BMk = torch.cat([paths_BMk.gather(1, above_BM1), tokens_BM[..., None]], -1)
            above_BM11 = above_BM1[..., None].expand(-1, -1, -1, drafted_BMkD.shape[-1])
            drafted_BMkD = self._ahead(state, paths_BMk, drafted_BMkD.gather(1, above_BM11[:, :, : level - 1]))
            return self.logits(drafted_BMkD[:, :, -1])

        return draft_tree(self.logits(state.newest[0]), step, self.vocab, tree, depth)

    def _settle(self, state: BlocksState) -> None:
        """Take in the committed slots: one new column of every module for each."""
        committed = state.pending.pop()
        counts = [int(count) for count in committed.count_B]
        count_B = committed.count_B.to(committed.last_BMD.device)
        each_B = torch.arange(len(counts), device=count_B.device)
        states_BMD = self._given(committed.last_BMD)
        block = state.cache.place(counts)
        before = state.newest or [torch.zeros_like(states_BMD[:, 0])] * self.depth
        state.newest = []
        for k, old_BD in enumerate(before):
            made_BMD = self._run(state.cache, k, committed.next_ids_BM, states_BMD, block)
            newest_BD = made_BMD[each_B, (count_B - 1).clamp(min=0)]
            state.newest.append(torch.where(count_B[:, None] > 0, newest_BD, old_BD))
            states_BMD = torch.cat([old_BD[:, None], made_BMD[:, :-1]], 1)
        state.cache.keep(counts)

    def _ahead(self, state: BlocksState, paths_BMk: Tensor, drafted_BMkD: Tensor) -> Tensor:
        """Module k over the k slots of each of M paths of drafted tokens [B, M, k], beside the settled ones: what it
        makes of them [B, M, k, D]. drafted: what module k - 1 made of its k - 1. The cache is left as it was."""
        rows, paths, k = paths_BMk.shape
        cache, device = state.cache, paths_BMk.device
        newest_BM1D = state.newest[k - 1][:, None, None].expand(-1, paths, -1, -1)
        states_BMD = torch.cat([newest_BM1D, drafted_BMkD], 2).flatten(1, 2)
        lengths_B = torch.tensor(cache.lengths, device=device)
        positions_BN = (lengths_B[:, None] + torch.arange(k, device=device)).repeat(1, paths)
        past_BNC = (torch.arange(cache.width, device=device) < lengths_B[:, None])[:, None].expand(-1, paths * k, -1)
        own_NN = torch.block_diag(*[torch.ones(k, k).tril()] * paths).bool().to(device)
        block = Block(positions_BN, torch.cat([past_BNC, own_NN.expand(rows, -1, -1)], -1))
        made_BND = self._run(cache, k, paths_BMk.flatten(1), states_BMD, block)
        cache.drop(k, paths * k)
        return made_BND.unflatten(1, (paths, k))

    def _run(self, cache: BlockCache, k: int, tokens_BN: Tensor, states_BND: Tensor, block: Block) -> Tensor:
        """Module k over new columns, appended to its part of the cache [B, N, D]."""
        module = self.modules_in_order[k]
        normed_BND = module.hidden_norm(states_BND)
        slot = module.join(self._embed(tokens_BN, normed_BND), normed_BND, block.positions_BN)
        rope = self.rotary(slot.x, block.positions_BN)
        allowed_BNC = block.allowed_BNC if k == 0 else _without_first(k, block, cache.width)
        return module.close(slot.residual, module.layer.self_attn.cached(slot.x, rope, cache, allowed_BNC, layer=k))


def _enter(
    module: MTPModule, embedded: Tensor, states: Tensor, positions: Tensor, rope: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Residual, queries, keys and values of some slots."""
    slot, attention = module.join(embedded, module.hidden_norm(states), positions), module.layer.self_attn
    return slot.residual, attention.queries(slot.x, rope), *attention.keys_values(slot.x, rope)


def _leave(module: MTPModule, residual: Tensor, attended_SHd: Tensor) -> Tensor:
    return module.close(residual, module.layer.self_attn.o_proj(attended_SHd.flatten(1)))


def _without_first(k: int, block: Block, width: int) -> Tensor:
    """Which columns the new ones see if the first k of each row hold nothing. One of those sees itself, so that its
    softmax has something to sum."""
    rows, nodes = block.positions_BN.shape
    device = block.positions_BN.device
    allowed_BNC = block.allowed_BNC
    if allowed_BNC is None:
        allowed_BNC = torch.ones(rows, nodes, width + nodes, dtype=torch.bool, device=device).tril(width)
    columns_BC = torch.cat([torch.arange(width, device=device).expand(rows, -1), block.positions_BN], -1)
    itself_NC = torch.eye(nodes, dtype=torch.bool, device=device)
    itself_NC = torch.cat([itself_NC.new_zeros(nodes, width), itself_NC], -1)
    return (allowed_BNC & (columns_BC >= k)[:, None]) | itself_NC
