"""The random generators of one process as tensors: of Python, NumPy, torch and this process's CUDA device.

It does not know where the tensors are kept.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def random_state() -> dict[str, Tensor]:
    """The generators of Python, NumPy and torch (and of this process's CUDA device) as tensors."""
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    numpy_flags = [numpy_state["state"]["pos"], numpy_state["has_gauss"]]
    state = {
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "numpy_position": torch.tensor(numpy_flags, dtype=torch.int64),
        "numpy_gauss": torch.tensor([numpy_state["gauss"]], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random(state: Mapping[str, Tensor]) -> None:
    """The inverse of `random_state`."""
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    position, has_gauss = state["numpy_position"].tolist()
    key = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, position, has_gauss, state["numpy_gauss"].item()))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
