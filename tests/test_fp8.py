"""Taps in 8 bits are the taps up to the format's rounding, in half the bytes of bf16; the last state is untouched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from heads.artifact import UserError
from heads.base import FeatureNeeds
from tests.test_store import NEEDS, VOCABULARY, WIDTH, documents, settings
from tests.tiny import load_tiny
from training.collect import collect
from training.fp8 import from_fp8, to_fp8
from training.regenerate import Generation
from training.store import FeatureStore, Storage, estimate_bytes
from training.store_writer import StoreWriter, _rows, _tensors
from training.traffic import Conversation


@pytest.mark.parametrize("outlier", [1.0, 3000.0])
def test_the_error_is_what_is_promised(outlier: float) -> None:
    """Relative down to 2^-15 of the largest entry of the same state, whatever the states beside it are."""
    states = torch.randn(50, 3 * 64, generator=torch.Generator().manual_seed(0))
    states[:, 70] *= outlier  # of the second of three states
    states[7, :64] = 0
    values, scale = to_fp8(states, 3)
    assert values.dtype == torch.float8_e4m3fn and values.shape == states.shape and scale.shape == (50, 3)
    back = from_fp8(values, scale, torch.float32)
    largest = states.unflatten(1, (3, 64)).abs().amax(-1, keepdim=True).expand(-1, -1, 64).flatten(1)
    normal = states.abs() >= largest * 2**-14
    assert ((back - states).abs()[normal] <= states.abs()[normal] * 2**-4).all()
    assert ((back - states).abs()[~normal] <= largest[~normal] * 2**-18).all()
    assert (back != states).float().mean() > 0.5, "nothing was rounded"
    other = to_fp8(states * (torch.arange(192) >= 64), 3)
    assert torch.equal(other[0][:, 64:].float(), values[:, 64:].float()), "a state depends on the one beside it"


@pytest.mark.parametrize("taps", [(1, 3), (3,), ()])
def test_a_store_gives_rounded_taps_and_the_last_state_as_it_was(tmp_path: Path, taps: tuple[int, ...]) -> None:
    given = documents(12)
    storage = Storage(dtype="fp8")
    writer = StoreWriter(tmp_path, settings(dtype="bfloat16", collect={"states": "stored", "dtype": "fp8"}))
    writer.add("shard-00000", ["k"], given, {})
    writer.finish(["shard-00000"], refused=[], vocab_size=VOCABULARY, body={})
    store = FeatureStore.open(tmp_path)
    store.verify()
    selected = store.select(FeatureNeeds(taps, True))
    for ref in store.documents:
        document, read = next(one for one in given if one.conversation == ref.conversation), selected.read(ref)
        assert document.taps_TE is not None and document.last_TD is not None
        chosen = [document.taps_TE[:, NEEDS.taps.index(tap) * WIDTH :][:, :WIDTH] for tap in taps]
        wanted = torch.cat([*chosen, document.taps_TE[:, :0]], 1)
        assert torch.equal(read.last_TD, document.last_TD) and read.last_TD.dtype == document.last_TD.dtype
        assert read.taps_TE.shape == wanted.shape
        if taps:
            assert read.taps_TE.dtype == torch.bfloat16
            assert torch.equal(read.taps_TE, from_fp8(*to_fp8(wanted, len(taps)), torch.bfloat16))
            assert not torch.equal(read.taps_TE.float(), wanted.float()), "nothing was rounded"
    tokens = sum(len(one.ids_T) for one in given)
    estimate = estimate_bytes(NEEDS, tokens, hidden_size=WIDTH, dtype=torch.bfloat16, storage=storage)
    assert estimate == tokens * (2 * (WIDTH + 4) + 2 * WIDTH + 9)
    assert 0 < (tmp_path / "shard-00000.safetensors").stat().st_size - estimate < 800, "the rest is the header"


def test_a_store_from_before_whose_last_state_is_in_8_bits_too_is_read(tmp_path: Path) -> None:
    given, own = documents(4), settings(dtype="bfloat16", collect={"states": "stored", "dtype": "fp8"})
    tensors = _tensors(given, own)
    plain = tensors["last"]
    tensors["last"], tensors["last_scale"] = to_fp8(plain, 1)
    writer = StoreWriter(tmp_path, own)
    writer.add_tensors("shard-00000", ["k"], tensors, _rows("shard-00000", given), {})
    writer.finish(["shard-00000"], refused=[], vocab_size=VOCABULARY, body={})
    store = FeatureStore.open(tmp_path)
    read = torch.cat([store.read(ref).last_TD for ref in sorted(store.documents, key=lambda ref: ref.offset)])
    assert torch.equal(read, from_fp8(tensors["last"], tensors["last_scale"], torch.bfloat16))


def test_a_head_without_taps_is_refused(tmp_path: Path) -> None:
    asked = Conversation("c", "a", (({"role": "user", "content": "w1"},),))
    with pytest.raises(UserError, match="this head stores no taps.*leave collect.dtype= out"):
        collect(
            target=load_tiny(tmp_path),
            conversations=[asked],
            folder=tmp_path / "f",
            needs=FeatureNeeds(),
            generation=Generation(max_new_tokens=2),
            storage=Storage(dtype="fp8"),
        )
    assert not (tmp_path / "f").exists()
    Storage(dtype="fp8").check(NEEDS)
    Storage().check(FeatureNeeds())
