"""Packed linear layers: the same numbers as plain ones, the same weights, and gradients still flow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from heads.base import TargetWeights
from heads.packed import PackedLinear, for_packed_queries, group_attention, grouped_attention, pack_linears
from tests.tiny import save_tiny


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


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float64, 0)])
@pytest.mark.parametrize(("bias", "softcap"), [(False, None), (True, 3.0)])
def test_a_draft_reads_by_the_target_as_the_target_does(dtype, tolerance: float, bias: bool, softcap) -> None:
    torch.manual_seed(0)
    weights = TargetWeights(
        torch.randn(70, 96).to(dtype),
        torch.randn(70, 96).to(dtype),
        torch.randn(70).to(dtype) if bias else None,
        softcap,
    ).over(torch.arange(3, 60))
    states = torch.randn(2, 5, 96).to(dtype)
    with torch.inference_mode():
        plain = weights.logits(states)
        torch.testing.assert_close(
            weights.read(states), plain, rtol=tolerance, atol=tolerance * float(plain.abs().max())
        )


@pytest.mark.parametrize(("nodes", "masked"), [(1, False), (1, True), (5, True), (9, False)])
def test_grouped_attention_equals_repeated_heads(nodes: int, masked: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, size, 8, dtype=torch.float64) for heads, size in ((6, nodes), (2, 9), (2, 9)))
    mask = torch.rand(2, 1, nodes, 9) < 0.6 if masked else None
    if mask is not None:
        mask[..., 0] = True
    causal = mask is None and nodes > 1
    wide = [states.repeat_interleave(3, 1) for states in (k, v)]
    plain = nn.functional.scaled_dot_product_attention(q, *wide, attn_mask=mask, is_causal=causal, scale=0.5)
    grouped, _ = grouped_attention(nn.Module(), q, k, v, mask, scaling=0.5)
    torch.testing.assert_close(grouped, plain.transpose(1, 2))


def test_a_mask_is_laid_out_once_for_all_layers(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path / "target"))
    mask = torch.randn(2, 1, 5, 9)
    assert for_packed_queries(model, mask) is mask  # plain sdpa shares keys by itself
    group_attention(model)
    laid_out = for_packed_queries(model, mask)
    groups = model.config.num_attention_heads // model.config.num_key_value_heads
    assert groups > 1 and laid_out.shape == (2, 1, 5 * groups, 9)
    q, k, v = torch.randn(2, 2 * groups, 5, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    once, _ = grouped_attention(nn.Module(), q, k, v, laid_out)
    each, _ = grouped_attention(nn.Module(), q, k, v, mask)
    torch.testing.assert_close(once, each, rtol=0, atol=0)
