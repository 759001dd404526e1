"""A target's own MTP module, trained further: DeepSeek-V3 (arXiv 2412.19437, section 2.2), GLM-4-MoE, Qwen3-Next,
Qwen3.5 and whatever else transformers has a decoder layer for, one block used K times (FastMTP, arXiv 2509.18362).

The block is the family's own decoder layer (latent or gated attention, experts), taken from transformers by the name of
the family, never from remote code; the weights are read from the target's checkpoint, whose causal model drops them.
Because the layer is opaque, training unrolls it with dense masks, one document at a time, of at most LONGEST positions:
a mask is as wide as all passes of the document. This file knows no file
format, no sampling rule and no optimizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Cache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import MtpModel

from heads.artifact import UserError
from heads.base import FeatureNeeds, LossSums, TargetFeatures
from heads.cache import Block, BlockCache
from heads.recurrent import Rope, SelfFedHead
from heads.target import FrozenTarget
from heads.vocab import DraftVocabulary

LONGEST = 8192  # positions of a document; at depth 4 its masks take more than a GB


class NativeMTPHead(SelfFedHead):
    """The MTP module of a family, used K times, with the target's embeddings and projection.

    sizes: the target's config as plain values (`sizes_of`); depth: passes K; loss, decay, eta: see
    heads.losses.Objective; norm_output: the state after the module's norm is fed back, else the one before it;
    zero_first: the embedding at rope position 0 is zero. Raises UserError on values or families that cannot be.
    """

    def __init__(
        self,
        *,
        sizes: Mapping[str, Any],
        vocab: DraftVocabulary,
        depth: int = 4,
        loss: str = "kl",
        decay: float | str = 0.6,
        eta: float = 3.0,
        norm_output: bool = True,
        zero_first: bool = False,
    ) -> None:
        own = {"sizes": dict(sizes), "norm_output": norm_output, "zero_first": zero_first}
        super().__init__(needs=FeatureNeeds(), vocab=vocab, depth=depth, loss=loss, decay=decay, eta=eta, own=own)
        self.norm_output, self.zero_first = norm_output, zero_first
        donor = _donor(sizes)
        module = MtpModel(donor, 1)
        if module.rotary_emb is None or module.has_per_layer_rope or not module.use_post_norm:
            raise UserError(f"MTP modules of {sizes['model_type']} are not supported; set head=mtp or head=eagle3.")
        self.module = module.layers[0]
        self.rotary = _Unrounded(type(module.rotary_emb)(config=module.config))
        for parameter in self.module.parameters():  # experts come without a value of their own
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=donor.config.initializer_range)

    @classmethod
    def sizes_of(cls, target: FrozenTarget) -> dict[str, Any]:
        """The target's config as plain values."""
        facts: dict[str, Any] = json.loads(target.config.to_json_string())
        return facts

    @classmethod
    def check_donor(cls, target: FrozenTarget) -> None:
        """By the names of the stored weights alone; those in pickles are not looked at."""
        folder = Path(target.model.config.name_or_path)
        here = [re.compile(pattern) for pattern in _names(target.num_layers)]
        unknown = not any(folder.glob("*.safetensors")) and any(folder.glob("*.bin"))
        if not unknown and not any(one.search(name) for name in _stored(folder) for one in here):
            raise _without_module(target, "its weights name none")

    @torch.no_grad()
    def initialise(self, target: FrozenTarget) -> None:
        """Take the weights from the target's checkpoint. Raises UserError when it has none."""
        donor, layers = _donor(self.arguments["sizes"]), target.num_layers
        donor.config.name_or_path = target.model.config.name_or_path
        donor.config.dtype = torch.float32
        donor._keys_to_ignore_on_load_unexpected = _names(layers)
        try:
            given = MtpModel.from_pretrained(donor)
        except (OSError, RuntimeError, ValueError) as error:
            raise _without_module(target, str(error).strip().splitlines()[0]) from error
        self.module.load_state_dict(given.layers[0].state_dict())

    def loss(self, features: TargetFeatures) -> LossSums:
        """Unrolled loss over one packed batch (see heads.pairs.summed)."""
        return self.learn(features, lambda starts_N: self.unroll(features, starts_N, self.depth))

    def unroll(self, features: TargetFeatures, starts_N: Tensor, depth: int) -> Tensor:
        """One document after the other, so that no mask is larger than a document asks for. UserError on one that is
        longer than LONGEST."""
        if max(features.lengths) > LONGEST:
            raise UserError(
                f"A document of {max(features.lengths)} positions is too long for head=mtp_native, whose masks grow "
                f"with the square; set train.max_length={LONGEST} or less."
            )
        base_TD = self.given(features.taps_TE, features.last_TD)
        outputs, first = [], 0
        for length in features.lengths:
            own_N = starts_N[(starts_N >= first) & (starts_N < first + length)] - first
            if len(own_N):
                document = slice(first, first + length)
                outputs.append(self._unroll_one(features.ids_T[document], base_TD[document], own_N, depth))
            first += length
        return torch.cat(outputs, dim=1)

    def _unroll_one(self, ids_T: Tensor, base_TD: Tensor, starts_N: Tensor, depth: int) -> Tensor:
        """Pass 0 runs every slot up to the last start; the others run the starts, and see the slots up to their own and
        their own column of the passes before."""
        slots, cache = int(starts_N[-1]) + 1, Cache(layer_class_to_replicate=DynamicLayer)
        slot_T = torch.arange(slots, device=ids_T.device)
        causal_TT = slot_T <= slot_T[:, None]
        fed_TD, output_TD = self._run(
            cache, ids_T[None, 1 : slots + 1], base_TD[None, :slots], slot_T[None], causal_TT[None]
        )
        fed_ND, outputs = fed_TD[0, starts_N], [output_TD[0, starts_N]]
        allowed_NC = causal_TT[starts_N]
        itself_NN = torch.eye(len(starts_N), dtype=torch.bool, device=ids_T.device)
        for k in range(1, depth):
            allowed_NC = torch.cat([allowed_NC, itself_NN], dim=-1)
            place_N = (starts_N + 1 + k).clamp(max=len(ids_T) - 1)
            fed_1ND, output_1ND = self._run(
                cache, ids_T[None, place_N], fed_ND[None], starts_N[None] + k, allowed_NC[None]
            )
            fed_ND = fed_1ND[0]
            outputs.append(output_1ND[0])
        return torch.stack(outputs)

    def given(self, taps: Tensor, last: Tensor) -> Tensor:
        """f as it is."""
        return last if torch.is_autocast_enabled(last.device.type) else last.to(self.module.eh_proj.weight.dtype)

    def slots(
        self, cache: BlockCache, next_ids_BM: Tensor, hidden_BMD: Tensor, block: Block, rope: Rope | None = None
    ) -> tuple[Tensor, Tensor]:
        allowed_BNC = block.allowed_BNC
        if allowed_BNC is None:
            nodes = next_ids_BM.shape[1]
            allowed_BNC = torch.ones(1, nodes, cache.width + nodes, dtype=torch.bool, device=cache.device)
            allowed_BNC = allowed_BNC.tril(cache.width)
        return self._run(cache.kv, next_ids_BM, hidden_BMD, block.positions_BN, allowed_BNC, rope)

    def logits(self, output: Tensor) -> Tensor:
        """By the target's own projection."""
        return self.draftable.read(output)

    def _run(
        self,
        kv: Cache,
        next_ids_BM: Tensor,
        hidden_BMD: Tensor,
        positions_BM: Tensor,
        allowed_BMC: Tensor,
        rope: Rope | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The module over new slots, appended to a cache of C - M others: (what is fed on, output) [B, M, D]."""
        module = self.module
        embedded_BMD = self.embed(next_ids_BM, hidden_BMD)
        if self.zero_first:
            embedded_BMD = embedded_BMD.masked_fill((positions_BM == 0)[..., None], 0.0)
        parts = [module.enorm(embedded_BMD), module.hnorm(hidden_BMD)]
        if self.arguments["sizes"].get("mtp_hidden_states_first", False):
            parts.reverse()
        x_BMD = module.eh_proj(torch.cat(parts, dim=-1))
        mask = torch.zeros(allowed_BMC.shape, dtype=x_BMD.dtype, device=x_BMD.device)
        mask = mask.masked_fill_(~allowed_BMC, torch.finfo(x_BMD.dtype).min)[:, None]
        raw_BMD = module.mtp_block(
            x_BMD,
            attention_mask=mask,
            position_embeddings=rope if rope is not None else self.rotary(x_BMD, positions_BM),
            position_ids=positions_BM,
            cache=kv,
        )
        output_BMD = module.post_norm(raw_BMD)
        return (output_BMD if self.norm_output else raw_BMD), output_BMD


def _names(layers: int) -> list[str]:
    """Which tensors of a checkpoint are the module's: those of a layer behind the last, or of a part called mtp."""
    return [rf"model\.layers\.{layers}\.", r"(^|\.)mtp\."]


def _stored(folder: Path) -> Iterator[str]:
    """The names of all weights in the safetensors files of a folder."""
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt") as weights:
                yield from weights.keys()
        except SafetensorError as error:
            raise UserError(f"{file} cannot be read ({error}); fetch the target anew.") from error


def _without_module(target: FrozenTarget, reason: str) -> UserError:
    return UserError(
        f"The target at {target.path} has no MTP module that can be read ({reason}); set head=mtp to train one from "
        f"the beginning."
    )


class _Unrounded(nn.Module):
    """A family's rotary tables. Their frequencies keep their precision when a head is cast (see layers.Rotary)."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, states: Tensor, positions: Tensor) -> Any:
        """cos and sin of positions, in the dtype of the states."""
        return self.tables(states, positions)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Unrounded:
        kept = dict(self.tables.named_buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, moved in list(self.tables.named_buffers()):
            setattr(self.tables, name, kept[name].to(moved.device))
        return self


def _donor(sizes: Mapping[str, Any]) -> PreTrainedModel:
    """A target of this config without memory: what transformers takes the kinds of layer, norm and rotary from.

    Raises UserError when transformers has no such family, or when its MTP layer does not see the whole text.
    """
    facts = dict(sizes)
    try:
        config = AutoConfig.for_model(facts.pop("model_type"), **facts)
        _give_one_mtp_layer(config)
    except UserError:
        raise
    except (AttributeError, ValueError, StrictDataclassError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"The configuration of {sizes['model_type']} cannot be turned into that of an MTP layer ({reason}); "
            f"set head=mtp or head=eagle3."
        ) from error
    with torch.device("meta"):
        # The plain loop over experts is the one that takes every number format, autocast among them.
        return AutoModelForCausalLM.from_config(config, experts_implementation="eager")


def _give_one_mtp_layer(config: PreTrainedConfig) -> None:
    """Say in transformers' words that the module has one layer of full attention; families that name no kinds of layer
    for it are Qwen's, whose module attends in full."""
    facts = config.to_dict()
    if facts.get("layer_types") is not None:
        kinds = facts.get("mtp_layer_types") or ["full_attention"]
        if kinds[0] != "full_attention":
            raise UserError(f"MTP layers of kind {kinds[0]} are not supported; set head=mtp or head=eagle3.")
        config.mtp_layer_types = kinds[:1]
        config.layer_types = ["full_attention"] * config.num_hidden_layers
    if facts.get("mlp_layer_types") is not None:
        config.mtp_mlp_layer_types = (facts.get("mtp_mlp_layer_types") or facts["mlp_layer_types"][-1:])[:1]
    config.num_mtp_layers = 1
