"""The unrolled attention: the fast form is the dense reference, and no slot sees the future or a neighbour. The norm:
transformers' own."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from heads.layers import RMSNorm
from heads.unrolled import Columns, dense_attention, fused_attention, unrolled_attention


def problem(dtype: torch.dtype, passes: int) -> tuple[list[torch.Tensor], Columns]:
    torch.manual_seed(0)
    lengths, starts = (5, 9, 2), torch.tensor([1, 2, 3, 6, 9, 12, 13, 15])
    shapes = [(8, 4, 16)] + [(16, 2, 16)] * 2 + [(8, 2, 16)] * (2 * passes)
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes], Columns(lengths, starts)


def run(form, tensors: list[torch.Tensor], columns: Columns) -> torch.Tensor:
    q, k, v, *own = tensors
    return form(q, (k, v), list(zip(own[::2], own[1::2], strict=True)), columns)


PRECISIONS = [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)]


@pytest.mark.parametrize("passes", [0, 1, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_fast_equals_dense(dtype: torch.dtype, tolerance: float, passes: int) -> None:
    # bf16 keeps 8 bits of mantissa; values here are of order 1 to 4.
    tensors, columns = problem(dtype, passes)
    fast, dense = run(unrolled_attention, tensors, columns), run(dense_attention, tensors, columns)
    torch.testing.assert_close(fast, dense, rtol=tolerance, atol=tolerance)
    weight = torch.randn_like(dense)
    ours = torch.autograd.grad((fast * weight).sum(), tensors)
    theirs = torch.autograd.grad((dense * weight).sum(), tensors)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_autocast_changes_nothing() -> None:
    """Backward recomputes the scores outside of autocast: those of forward must be as precise, however large."""
    tensors, columns = problem(torch.bfloat16, 2)
    large = [(20 * tensor).detach().requires_grad_() for tensor in tensors]
    plain = run(unrolled_attention, large, columns)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run(unrolled_attention, large, columns)
    assert torch.equal(plain, cast)
    weight = torch.randn_like(plain)
    for a, b in zip(*(torch.autograd.grad((out * weight).sum(), large) for out in (plain, cast)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("passes", [0, 1, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_equals_dense(
    dtype: torch.dtype, tolerance: float, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uncompiled on CPU. torch refuses gradients there because its kernels have none; those of the uncompiled form are
    reached past the refusal, so that the merging is bound here and the kernels by scripts.gpu_check."""
    tensors, columns = problem(dtype, passes)
    fused = run(fused_attention, [tensor.detach() for tensor in tensors], columns)
    dense = run(dense_attention, tensors, columns)
    torch.testing.assert_close(fused, dense, rtol=tolerance, atol=tolerance)
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        run(fused_attention, tensors, columns)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *states: None)
    weight = torch.randn_like(dense)
    ours = torch.autograd.grad((run(fused_attention, tensors, columns) * weight).sum(), tensors)
    theirs = torch.autograd.grad((dense * weight).sum(), tensors)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("passes", [0, 1, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS[1:])
def test_flex_attention_equals_dense_on_a_gpu(dtype: torch.dtype, tolerance: float, passes: int) -> None:
    tensors, columns = problem(dtype, passes)
    columns = Columns(columns.lengths, columns.starts_N.cuda())
    tensors = [tensor.detach().cuda().requires_grad_() for tensor in tensors]
    fused, dense = run(fused_attention, tensors, columns), run(dense_attention, tensors, columns)
    torch.testing.assert_close(fused, dense, rtol=tolerance, atol=tolerance)
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), tensors) for out in (fused, dense)), strict=True):
        torch.testing.assert_close(a, b, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("lengths", [(300, 200, 77), (700,), (1, 130, 2, 260, 128), (5, 9, 2)], ids=str)
@pytest.mark.parametrize("every", [1, 3])
def test_the_mask_by_edges_is_the_one_over_all_pairs(lengths: tuple[int, ...], every: int) -> None:
    """No block that is seen is left out; one that goes untested is seen whole. With starts that leave out some slots a
    block may be listed that nobody sees: it is tested pair by pair all the same."""
    starts = torch.arange(0, sum(lengths), every)
    mask = Columns(lengths, starts).mask
    truth = create_block_mask(mask.mask_mod, None, None, len(starts), sum(lengths), device="cpu")
    assert mask.shape == truth.shape
    full, seen = (whole_blocks(one) for one in (mask, truth))
    assert torch.equal(full[0], seen[0]) and bool((full[1] >= seen[1]).all())
    if every == 1:
        assert torch.equal(full[1], seen[1])


def whole_blocks(mask) -> tuple[torch.Tensor, torch.Tensor]:
    """Which blocks go untested, and which are looked at at all."""
    shape = mask.kv_indices.shape[-2:]
    full = torch.zeros(shape, dtype=torch.bool)
    for row, (count, order) in enumerate(zip(mask.full_kv_num_blocks[0, 0], mask.full_kv_indices[0, 0], strict=True)):
        full[row, order[: int(count)].long()] = True
    return full, mask.to_dense()[0, 0].bool()


@pytest.mark.parametrize("scores", [1, 12, 20])
def test_blocks_of_any_size_give_the_same(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One query at a time, two or four in the longest document."""
    tensors, columns = problem(torch.float64, 2)
    whole = run(unrolled_attention, tensors, columns)
    expected = torch.autograd.grad(whole.square().sum(), tensors)
    monkeypatch.setattr("heads.unrolled.SCORES", scores)
    columns = Columns(columns.lengths, columns.starts_N)
    assert len(columns.blocks) > 3
    blocked = run(unrolled_attention, tensors, columns)
    torch.testing.assert_close(blocked, whole, rtol=1e-12, atol=1e-12)
    for a, b in zip(torch.autograd.grad(blocked.square().sum(), tensors), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_norm_is_that_of_transformers_in_value_and_gradient(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(1)
    ours, theirs = RMSNorm(32, 1e-5).to(dtype), LlamaRMSNorm(32, 1e-5).to(dtype)
    states = torch.randn(2, 5, 32, dtype=dtype, requires_grad=True)
    for norm in (ours, theirs):
        norm.load_state_dict({"weight": torch.linspace(0.5, 2, 32)})
    weight = torch.randn(2, 5, 32, dtype=dtype)
    grads = [torch.autograd.grad((norm(states) * weight).sum(), [states, norm.weight]) for norm in (ours, theirs)]
    if dtype is torch.float64:  # transformers norms in fp32 whatever it is given
        tolerance = 1e-5
    torch.testing.assert_close(ours(states), theirs(states), rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        torch.testing.assert_close(ours(states), theirs(states), rtol=tolerance, atol=tolerance)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("form", [unrolled_attention, fused_attention, dense_attention])
def test_no_slot_sees_later_slots_or_other_documents(form) -> None:
    tensors, columns = problem(torch.float64, 1)
    tensors = [tensor.detach() for tensor in tensors]
    before = run(form, tensors, columns)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(columns.lengths))
    for slot in range(16):
        changed = [tensor.detach().clone() for tensor in tensors]
        changed[1][slot] += 1
        changed[2][slot] -= 1
        moved = (run(form, changed, columns) - before).abs().amax((1, 2)) > 1e-9
        sees = (documents[columns.starts_N] == documents[slot]) & (columns.starts_N >= slot)
        assert torch.equal(moved, sees), f"slot {slot}"
