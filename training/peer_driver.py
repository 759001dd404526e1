"""Trains an EAGLE-3 draft with speculators, a few steps at a time, when it is told to.

This file is executed by path in the interpreter of an environment that has speculators:

    python peer_driver.py REQUEST.json

It uses the standard library and speculators only. It knows nothing of Draftsmith: the request names the target and the
sizes, and training.turns says what is written and read. What runs is speculators' own epoch loop over its own model and
optimizer. Where there is no CUDA it is told the device, attends by sdpa and takes its eager loss; nothing else differs.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, TextIO

FIELDS = (
    *("target", "taps", "passes", "vocabulary", "lengths", "precision", "threads", "seed"),
    *("norm_before_residual", "fc_norm", "norm_output", "qk_norm"),
)
REFUSED = 2


def read_request(path: str) -> dict[str, Any]:
    """The request file; ends with one sentence when it is not one."""
    try:
        with open(path, encoding="utf-8") as file:
            request = json.load(file)
    except (OSError, ValueError) as error:
        refuse(f"Cannot read the request {path}: {error}.")
    if not isinstance(request, dict) or set(request) != set(FIELDS):
        given = sorted(request) if isinstance(request, dict) else type(request).__name__
        refuse(f"The request {path} must have exactly the keys {sorted(FIELDS)}, not {given}.")
    return dict(request)


def refuse(sentence: str) -> None:
    """End with one sentence as the last line on stderr."""
    sys.stderr.write(f"{sentence}\n")
    sys.exit(REFUSED)


def model_arguments(request: dict[str, Any], cuda: bool) -> dict[str, Any]:
    """What speculators' command line would hand to the model, for a head of the shapes of the request."""
    return {
        "verifier_name_or_path": request["target"],
        "target_layer_ids": request["taps"],
        "draft_vocab_size": len(request["vocabulary"]),
        "ttt_steps": request["passes"],
        "ttt_step_loss_decay": 1.0,
        "norm_before_residual": request["norm_before_residual"],
        "fc_norm": request["fc_norm"],
        "norm_output": request["norm_output"],
        "norm_before_fc": False,
        "draft_attn_impl": "simple_flex_attention" if cuda else "sdpa",
        "loss_fn": "kl_div",
        "loss_implementation": "fused" if cuda else "eager",
    }


def batch_of(request: dict[str, Any], vocab_size: int, hidden_size: int) -> dict[str, Any]:
    """One packed row of random ids and states in the form of speculators' own collate function, all supervised."""
    import torch

    lengths, chosen = request["lengths"], torch.tensor(request["vocabulary"])
    total = sum(lengths)
    assert int(chosen.max()) < vocab_size
    return {
        "hidden_states": torch.randn(1, total, len(request["taps"]) * hidden_size).to(torch.bfloat16),
        "verifier_last_hidden_states": torch.randn(1, total, hidden_size).to(torch.bfloat16),
        "input_ids": chosen[torch.randint(len(chosen), (1, total))],
        "loss_mask": torch.ones(1, total, dtype=torch.bool),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "document_ids": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None],
        "error_records": 0,
    }


class Rows:
    """The same batch as often as it is asked for, where the trainer expects a DataLoader."""

    batch_sampler = None

    def __init__(self, batch: dict[str, Any]) -> None:
        self.batch, self.steps = batch, 1

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(self.batch) for _ in range(self.steps))


def build(request: dict[str, Any], folder: str) -> tuple[Any, Rows]:
    """speculators' trainer over its model, and the rows it reads. folder: where it would save, which it never does."""
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.cli import create_transformer_layer_config
    from speculators.train.trainer import Trainer, TrainerConfig

    torch.set_num_threads(request["threads"])
    torch.manual_seed(request["seed"])
    cuda = torch.cuda.is_available()

    class HereTrainer(Trainer):
        """On CPU, which the trainer does not look for; its lines for the terminal left out."""

        def setup_model(self) -> None:
            self.rank = 1  # rank 0 draws a progress bar
            if not cuda:
                self.local_rank, self.device_type = "cpu", "cpu"
            super().setup_model()

    layer = create_transformer_layer_config(
        verifier_name_or_path=request["target"],
        num_layers=1,
        draft_arch="qwen3" if request["qk_norm"] else "llama",
        hidden_act=None,
        sliding_window=2048,
        full_attention_indices=[0],
    )
    chosen = torch.tensor(request["vocabulary"])
    t2d = torch.zeros(layer.vocab_size, dtype=torch.bool)
    t2d[chosen] = True
    arguments = model_arguments(request, cuda)
    d2t = chosen - torch.arange(len(chosen))
    model = Eagle3DraftModel.from_training_args(verifier_config=layer, t2d=t2d, d2t=d2t, **arguments)
    config = TrainerConfig(
        lr=1e-3,
        num_epochs=1,
        save_path=folder,
        train_call_kwargs=Eagle3DraftModel.get_trainer_kwargs(**arguments)[0],
        scheduler_total_steps=1_000_000,
        hidden_states_dtype=getattr(torch, request["precision"]),
        log_freq=sys.maxsize,
    )
    rows = Rows(batch_of(request, layer.vocab_size, layer.hidden_size))
    trainer = HereTrainer(model, config, rows)
    trainer.global_step = 1  # step 0 would be logged, with a wait for an accelerator
    return trainer, rows


def memory() -> tuple[int, int]:
    """Bytes that this process holds now, and the most it has held since `forget_peak`; on CUDA the device's."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            told = dict(line.split(":", 1) for line in file)
        return int(told["VmRSS"].split()[0]) * 1024, int(told["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return peak, peak


def forget_peak() -> None:
    """Let the peak begin anew where the system can: what loading took is not what training takes."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        pass  # the peak then includes the loading


def hide_foreign_parts() -> None:
    """transformers imports these wherever they are installed, and ones that were built for another torch stop it."""
    for name in ("torchvision", "torchaudio"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            pass
        except (ImportError, OSError, RuntimeError):
            sys.modules[name] = None  # type: ignore[assignment]


def turns(request: dict[str, Any], answers: TextIO, folder: str) -> None:
    """Say that the first steps are done, then take as many as each line of stdin says, until it ends."""
    import torch

    def tell(**told: Any) -> None:
        print(json.dumps(told), file=answers, flush=True)

    trainer, rows = build(request, folder)
    loaded, _ = memory()
    forget_peak()
    trainer.train_epoch(0)  # with what is only done once: the optimizer's state, and compiling on CUDA
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    tell(version=importlib.metadata.version("speculators"), loaded=loaded, trained=trained)
    for line in sys.stdin:
        rows.steps = int(line)
        started = time.perf_counter()
        trainer.train_epoch(0)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        tell(seconds=seconds, positions=rows.steps * sum(request["lengths"]), memory=memory()[1])


def main(arguments: list[str]) -> None:
    """Keep stdout for the answers; whatever libraries print goes to stderr."""
    if len(arguments) != 1:
        refuse("Usage: python peer_driver.py REQUEST.json")
    request = read_request(arguments[0])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    hide_foreign_parts()
    try:
        import speculators  # noqa: F401
    except ModuleNotFoundError as error:
        refuse(f"{sys.executable} cannot import speculators ({error}); `pip install speculators==0.9.0` for it.")
    with tempfile.TemporaryDirectory() as folder:
        turns(request, answers, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
