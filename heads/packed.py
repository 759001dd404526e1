"""What makes inference on CPU quick: linear layers laid out once for oneDNN, attention without copies of shared keys.

PyTorch multiplies through a BLAS that lays the weight out anew at every call (and that is slow on some processors):
a few rows, which is what decoding is made of, then take two to three times as long. The original weight stays, so
packing costs its size in memory. This module does not know what the layers belong to.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_ROWS = 8  # the number of rows that the layout is chosen for; any number is right


class PackedLinear(nn.Linear):
    """A frozen nn.Linear that runs through a packed copy of its weight. Its `weight` is the original's own."""

    def __init__(self, plain: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias
        ops: Any = torch.ops.mkldnn
        # In a list, for a packed tensor can neither be moved nor saved.
        self._packed = [ops._reorder_linear_weight(plain.weight.detach(), _ROWS)]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that nn.Linear gives it
        """As nn.Linear; gradients, another dtype or empty inputs take the plain way."""
        weight = self.weight
        if input.dtype != weight.dtype or not input.numel() or (torch.is_grad_enabled() and input.requires_grad):
            return F.linear(input, weight, self.bias)
        ops: Any = torch.ops.mkldnn
        output: Tensor = ops._linear_pointwise(input, self._packed[0], self.bias, "none", [], "")
        return output


def packed_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A frozen linear layer over these very tensors, packed where this machine can."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return PackedLinear(layer) if _packable(weight) else layer


def pack_linears(module: nn.Module) -> None:
    """Replace every linear layer of a module that is used for inference only, where this machine can."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and _packable(child.weight):
                child.requires_grad_(False)
                setattr(parent, name, PackedLinear(child))


def group_attention(model: PreTrainedModel) -> None:
    """Let a model on CPU that attends by sdpa take the query heads of one key/value head as more queries."""
    if model.device.type == "cpu" and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(_GROUPED)


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, H, N, d], key and value [B, G, C, d] -> output [B, N, H, d].

    A mask may come with its rows laid out for the packed queries already (`for_packed_queries`).
    """
    groups, nodes = query.shape[1] // key.shape[1], query.shape[2]
    if attention_mask is None and nodes > 1:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1)
        return out.transpose(1, 2), None
    packed = query.unflatten(1, (-1, groups)).flatten(2, 3)
    mask = attention_mask
    if mask is not None and mask.shape[2] != packed.shape[2]:
        mask = mask.repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    return out.unflatten(2, (groups, nodes)).flatten(1, 2).transpose(1, 2), None


def for_packed_queries(model: PreTrainedModel, mask_B1NC: Tensor) -> Tensor:
    """An additive mask laid out once for all layers, where the model attends by `grouped_attention`; else as it is."""
    config = model.config.get_text_config()
    if config._attn_implementation != _GROUPED:
        return mask_B1NC
    return mask_B1NC.repeat(1, 1, config.num_attention_heads // config.num_key_value_heads, 1)


_GROUPED = "grouped"
ALL_ATTENTION_FUNCTIONS.register(_GROUPED, grouped_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(_GROUPED, sdpa_mask)


def _packable(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    ops: Any = torch.ops.mkldnn
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and ops._is_mkldnn_bf16_supported())
