"""Packed linear layers: the same numbers as plain ones, the same weights, and gradients still flow."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from heads.packed import PackedLinear, pack_linears


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5, 64])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float64, 0)])
def test_packed_equals_plain(dtype: torch.dtype, tolerance: float, rows: int, bias: bool) -> None:
    # fp32: other order of summation over 96 terms; bf16: one unit in the last of 8 bits; fp64 is left alone.
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(96, 33, bias=bias)).to(dtype)
    x = torch.randn(2, rows, 96).to(dtype)
    plain = module(x).detach()
    pack_linears(module)
    assert isinstance(module[0], PackedLinear) == (dtype != torch.float64 and torch.backends.mkldnn.is_available())
    with torch.inference_mode():
        torch.testing.assert_close(module(x), plain, rtol=tolerance, atol=tolerance)


def test_weights_stay_shared_and_gradients_take_the_plain_way() -> None:
    module = nn.ModuleDict({"embed": nn.Embedding(7, 8), "head": nn.Linear(8, 7, bias=False)})
    module["head"].weight = module["embed"].weight
    pack_linears(module)
    assert module["head"].weight is module["embed"].weight
    x = torch.randn(3, 8, requires_grad=True)
    module["head"](x).sum().backward()
    torch.testing.assert_close(x.grad, module["embed"].weight.sum(0).expand(3, 8))
