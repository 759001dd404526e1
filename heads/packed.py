"""Linear layers whose weight is laid out once for oneDNN, for inference on CPU.

PyTorch multiplies through a BLAS that lays the weight out anew at every call (and that is slow on some processors):
a few rows, which is what decoding is made of, then take two to three times as long. The original weight stays, so
packing costs its size in memory. This module does not know what the layers belong to.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def pack_linears(module: nn.Module) -> None:
    """Replace every linear layer of a module that is used for inference only, where this machine can."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and _packable(child.weight):
                child.requires_grad_(False)
                setattr(parent, name, PackedLinear(child))


def _packable(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    ops: Any = torch.ops.mkldnn
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and ops._is_mkldnn_bf16_supported())
