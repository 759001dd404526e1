"""`train.compile`: the same loss, gradients and checkpoints through torch.compile, and no graphs for new lengths."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch._dynamo.utils import counters

from heads.artifact import UserError
from heads.base import TargetWeights
from heads.compiled import check_compiler, start_compiling
from heads.layers import BlockSizes
from heads.mtp import MTPHead
from heads.mtp_blocks import MTPBlocksHead
from heads.vocab import DraftVocabulary
from scripts.settings import train_settings
from tests import e2e
from tests.test_eagle3 import TAPS, make_head
from tests.tiny import features_of, load_tiny
from tests.training_toy import VOCABULARY, WIDTH, toy_train, weights_of
from training.settings import TrainSettings

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = [(20, 9, 13), (30,), (11, 40), (17, 17, 17), (8, 5, 60), (25, 26)]


@pytest.fixture
def compiling() -> Iterator[None]:
    """What a training does before it begins, undone."""
    before = torch._dynamo.config.optimize_ddp
    start_compiling()
    counters.clear()
    yield
    torch._dynamo.config.optimize_ddp = before
    torch.compiler.reset()


def recurrent_head(kind: type = MTPHead, seed: int = 0) -> Any:
    """A tiny head of the toy documents' sizes, on weights of a target that are the same for every seed."""
    torch.manual_seed(9)
    target = TargetWeights(torch.randn(VOCABULARY, WIDTH), torch.randn(VOCABULARY, WIDTH) / 4)
    torch.manual_seed(seed)
    rope = {"rope_type": "default", "rope_theta": 1e4}
    sizes = BlockSizes(WIDTH, 32, 4, 2, 4, VOCABULARY, 8, 64, 1e-6, rope)
    head = kind(sizes=sizes, vocab=DraftVocabulary.identity(VOCABULARY), depth=2)
    head.attach(target)
    return head


def batches(target: Any) -> Iterator[Any]:
    draw = torch.Generator().manual_seed(3)
    for lengths in LENGTHS:
        texts = [torch.randint(3, 96, (length,), generator=draw).tolist() for length in lengths]
        documents = [(text, [index >= len(text) // 3 for index in range(len(text))]) for text in texts]
        yield features_of(target, documents, TAPS)


@pytest.mark.slow
def test_loss_and_gradients_are_the_same_and_lengths_bring_no_graphs(tmp_path: Path, compiling: None) -> None:
    """fp32; also with passes that are computed again. A batch must not cost a compilation each."""
    target = load_tiny(tmp_path, dtype="float32")
    head, graphs = make_head(target, depth=2), []
    for features in batches(target):
        seen = []
        for head.compiled, head.recompute in ((False, False), (True, False), (True, True)):
            head.zero_grad()
            sums = head(features)
            sums.loss.backward()
            seen.append([sums.loss.detach(), *(parameter.grad for parameter in head.parameters())])
            if not head.compiled:
                assert counters["stats"]["unique_graphs"] == (graphs[-1] if graphs else 0), "the plain way compiles"
        for fast in seen[1:]:
            for ours, plain in zip(fast, seen[0], strict=True):
                torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5 * float(plain.abs().max()))
        graphs.append(counters["stats"]["unique_graphs"])
    assert 4 <= graphs[0], "nothing was compiled"
    assert graphs[-1] == graphs[1] <= 9, f"graphs after each batch: {graphs}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [MTPHead, MTPBlocksHead])
def test_a_run_goes_on_with_and_without_it_and_its_checkpoints_have_the_same_names(
    tmp_path: Path, kind: type, only_traced: None
) -> None:
    """Plain throughout; then three steps compiled, the rest plain; and the other way round."""
    whole = recurrent_head(kind)
    toy_train(tmp_path / "plain", whole, max_steps=4, save_every=2)
    for name, order in {"first": (True, False), "then": (False, True)}.items():
        head, folder = recurrent_head(kind), tmp_path / name
        with pytest.raises(KeyboardInterrupt):
            toy_train(folder, head, max_steps=4, save_every=2, compile=order[0], eval_every=3, on_eval=interrupt)
        head = recurrent_head(kind, seed=1)
        assert toy_train(folder, head, max_steps=4, save_every=2, compile=order[1]).resumed_from == 2
        assert head.compiled == order[1]
        for weights, plain in zip(weights_of(head).values(), weights_of(whole).values(), strict=True):
            torch.testing.assert_close(weights, plain, rtol=1e-3, atol=1e-4)  # four steps of Adam apart
        assert names_in(folder) == names_in(tmp_path / "plain")
        assert sorted(head.state_dict()) in names_in(folder).values()


def interrupt(step: int, state: Any) -> None:
    raise KeyboardInterrupt


def names_in(folder: Path) -> dict[str, list[str]]:
    """The tensors of every file of the checkpoints."""
    found = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found[str(path.relative_to(folder / "checkpoints"))] = sorted(file.keys())
    return found


def test_a_head_without_anything_to_compile_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train.compile=true: a ToyHead has nothing that is compiled; set it to false"):
        toy_train(tmp_path, compile=True)


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda patch: patch.setenv("CXX", "no-such-compiler"), "a C.. compiler .no-such-compiler is not there"),
        (lambda patch: patch.setattr("sysconfig.get_path", lambda name: "/nowhere"), "header files ./nowhere/Python.h"),
        (lambda patch: no_triton(patch), "Triton"),
    ],
    ids=["compiler", "headers", "triton"],
)
def test_what_is_missing_is_said_before_any_work(monkeypatch: pytest.MonkeyPatch, break_it: Any, said: str) -> None:
    check_compiler()
    cfg = e2e.config("train.compile=true", "train.mixed_precision=no")
    break_it(monkeypatch)
    with pytest.raises(UserError, match=rf"train.compile=true needs .*{said}.*or set it to false"):
        train_settings(cfg)
    TrainSettings()


def no_triton(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("torch.cuda.is_available", lambda: True)
    patch.setattr("heads.compiled.find_spec", lambda name: None)
