"""What several test files share: one finished run of the whole pipeline, one thread for tiny models."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from heads.compiled import _compiled
from tests import e2e


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> e2e.Finished:
    """`python -m scripts.pipeline` over a tiny target, once for all tests. Nobody writes into its folder."""
    place = e2e.new_place(tmp_path_factory.mktemp("finished"))
    output = e2e.call(place, "pipeline")
    assert output.returncode == 0, output.stderr
    return e2e.Finished(place, output)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command that runs in this process sets up logging on the stream of its own test, which then closes."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def only_traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile without its back end, whose C++ compiler takes seconds for a graph."""
    real = torch.compile
    monkeypatch.setattr("torch.compile", lambda one, **how: real(one, **{"backend": "aot_eager", **how}))
    yield
    _compiled.cache_clear()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models are slower on many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
