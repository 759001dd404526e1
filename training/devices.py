"""On how many devices a head is trained: one, copies on several (DDP), or shards over several (FSDP2).

Which of them is the launcher's word, so one configuration file of accelerate decides. Sharded are weights, gradients
and optimizer; a step gathers the whole head once, as it is one layer deep. What leaves this module is whole tensors,
so a checkpoint does not tell how many processes wrote it. It does not know the head, its loss, or the optimizer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from heads.artifact import UserError


def open_accelerator(device: torch.device) -> Accelerator:
    """Accelerate as this loop uses it, on this device; autocast is ours, so runs of one process may differ in it.

    Raises UserError for what a launcher asks for and this loop does not do.
    """
    _check_launcher()
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # a single process is given the current one
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    # Accelerate would take a GPU wherever there is one, and without `cpu` and without one make every process a rank 0.
    return Accelerator(mixed_precision="no", cpu=device.type == "cpu", kwargs_handlers=[ddp])


def computes_bf16(device: torch.device) -> bool:
    """Whether bfloat16 is quick there; a CPU without instructions for it is quicker in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    can = torch.cpu.get_capabilities()
    return device.type != "cpu" or any(can.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def _asked(name: str) -> bool:
    return os.environ.get(name, "").lower() == "true"


def _check_launcher() -> None:
    if _asked("ACCELERATE_USE_DEEPSPEED"):
        raise UserError(
            "DeepSpeed steps by itself, before the count that a loss is divided by is known; shard the head with "
            "`--config_file conf/accelerate/fsdp2.yaml` instead, which holds as little per device."
        )
    if _asked("ACCELERATE_USE_FSDP") and os.environ.get("FSDP_VERSION", "1") != "2":
        raise UserError("Only FSDP2 is supported; set fsdp_version: 2, as conf/accelerate/fsdp2.yaml does.")


def wrap(accelerator: Accelerator, module: nn.Module) -> nn.Module:
    """The module such that its backward leaves the mean of the gradients over all processes.

    Sharded, its parameters are DTensors outside of forward and backward. That is done here, as accelerate takes no
    notice of FSDP on the CPU.
    """
    if accelerator.num_processes > 1 and _asked("ACCELERATE_USE_FSDP"):
        # One group: a head's loss reads its weights directly, which no hook of a submodule would see.
        fully_shard(module, mesh=init_device_mesh(accelerator.device.type, (accelerator.num_processes,)))
        return module
    wrapped: nn.Module = accelerator.prepare(module)
    return wrapped


@contextlib.contextmanager
def without_exchange(model: nn.Module) -> Iterator[None]:
    """Within the context gradients are only added up on each process."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    elif isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    else:
        yield


def is_sharded(module: nn.Module) -> bool:
    """Whether each process holds a part of the parameters only."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def whole(tensor: Tensor) -> Tensor:
    """A tensor of which this process may hold a shard, with all of it; every process calls it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor of the parameter's shape, sharded as the parameter is; one of another shape as it is."""
    if isinstance(parameter, DTensor) and tensor.shape == parameter.shape:
        return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)
    return tensor


def whole_state(module: nn.Module) -> Mapping[str, Tensor]:
    """The module's state with whole tensors; every process calls it."""
    return {name: whole(tensor) for name, tensor in module.state_dict().items()}


def make_whole(module: nn.Module) -> None:
    """Give the module whole parameters again, after its training; every process calls it."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                tensor = nn.Parameter(parameter.full_tensor().detach(), requires_grad=parameter.requires_grad)
                part.register_parameter(name, tensor)


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """On the CPU, sums in the same order each time: without this some scatter kernels race."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic
    before = fill.fill_uninitialized_memory  # type: ignore[attr-defined]
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
        fill.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn)
        fill.fill_uninitialized_memory = before  # type: ignore[attr-defined]
