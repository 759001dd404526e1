"""What of training goes through torch.compile (train.compile), and what must be there for it.

Functions are compiled, never modules, so that no name of a weight changes. The module does not know what they compute.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from heads.artifact import UserError

_GRAPHS = 32  # of one function: sizes of 1 and of blocks that happen to equal another size have graphs of their own


def compiled(function: Callable[..., Any], wanted: bool) -> Callable[..., Any]:
    """The function, through torch.compile where that is wanted: once for all lengths, as those of batches differ.

    In one graph: what cannot be compiled, or must be compiled again too often, is an error and not silently slow.
    """
    return _compiled(function) if wanted else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    options: dict[str, Any] = {"dynamic": True, "fullgraph": True, "recompile_limit": _GRAPHS}
    made: Callable[..., Any] = torch.compile(function, **options)
    return made


def start_compiling() -> None:
    """What is compiled from here on is counted anew, as runs of a sweep share a process; within DDP too, a graph
    stays one (its own splitting knows no FlexAttention, and a head is one layer deep)."""
    _compiled.cache_clear()
    torch.compiler.reset()
    torch._dynamo.config.optimize_ddp = False


def check_compiler() -> None:
    """Raises UserError where torch.compile lacks a C++ compiler, Python's header files, or on a GPU Triton."""
    wanted = os.environ.get("CXX", "g++")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    missing = None
    if shutil.which(wanted) is None:
        missing = f"a C++ compiler ({wanted} is not there; install g++, or name one by CXX=)"
    elif not header.is_file():
        missing = f"Python's header files ({header} is not there; install python3-dev)"
    elif torch.cuda.is_available() and find_spec("triton") is None:
        missing = "Triton (pip install triton)"
    if missing is not None:
        raise UserError(f"train.compile=true needs {missing}; or set it to false.")
