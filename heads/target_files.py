"""The files of a target: where they are (a folder, a Hub id, a GGUF file), whether they can be read, and what they tell
without its weights.

It knows what transformers makes of them only as far as that goes wrong; the model itself is `heads.target`'s.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # the one it asks with, by whatever name
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from heads.artifact import UserError

# What huggingface_hub raises where the Hub refuses, cannot be reached, or a name is none.
HUB_FAULTS: tuple[type[Exception], ...] = (OSError, HFValidationError, httpx.HTTPError)
_CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json")
# What transformers raises over files that are damaged, or hold values that cannot be.
_FAULTS = (
    *(OSError, ValueError, LookupError, RuntimeError, SafetensorError),
    *(TypeError, AttributeError, ArithmeticError, StrictDataclassError),
)


def load_tokenizer(
    path: str | Path, *, gguf_file: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a target, without its weights. Raises UserError when there is none."""
    folder, gguf_file = resolve(str(path), gguf_file)
    check_configs(path, folder)
    options = {"gguf_file": gguf_file} if gguf_file else {}
    with loading(path):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, **options)


def check_is_there(path: str | Path, *, gguf_file: str | None = None) -> None:
    """Raises UserError where a target can be seen not to be there, or to have a configuration that is none; its weights
    are not looked at."""
    check_configs(path, resolve(str(path), gguf_file, only=_CONFIGS)[0])


def layers_told(path: str, *, trust_remote_code: bool = False) -> int | None:
    """How many layers a target has as its config tells, without its weights; None where that cannot be read alone (a
    GGUF file, no config): loading the target says what is wrong then."""
    try:
        folder, _ = resolve(path, None, only=("*.json", "*.py"))
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).get_text_config()
    except (ImportError, *_FAULTS):
        return None
    layers: int = config.num_hidden_layers
    return layers


@contextmanager
def loading(path: str | Path) -> Iterator[None]:
    """Whatever transformers finds wrong with a target's files, as one sentence."""
    try:
        yield
    except ImportError as error:
        reason = _reason(error).removesuffix(".")
        raise UserError(
            f"The target at {path} needs a package that is not here ({reason}); install it, or set "
            f"target.attention=sdpa where it is flash_attention_2."
        ) from error
    except _FAULTS as error:
        raise _unloadable(path, _reason(error)) from error


def check_configs(path: str | Path, folder: str) -> None:
    """Refuse a configuration that is no JSON object, over which transformers stumbles in many ways."""
    for file in (Path(folder) / name for name in _CONFIGS):
        if not file.is_file():
            continue
        try:
            told = json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            raise _unloadable(path, f"its {file.name} is not JSON: {_reason(error)}") from error
        if not isinstance(told, dict):
            raise _unloadable(path, f"its {file.name} holds no JSON object")


def _reason(error: Exception) -> str:
    """The first line of what an error says, and the next where that one only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def _unloadable(path: str | Path, reason: str) -> UserError:
    return UserError(
        f"The target at {path} could not be loaded ({reason}); target.path= must name a folder, Hub id or GGUF file "
        f"of a causal language model with its tokenizer."
    )


def resolve(path: str, gguf_file: str | None, *, only: Sequence[str] | None = None) -> tuple[str, str | None]:
    """A local folder for a path or Hub id, and the name of the GGUF file in it if that is what is loaded. only: what is
    fetched from the Hub, None for all that loading takes."""
    given = path
    if path.endswith(".gguf"):
        path, gguf_file = str(Path(path).parent), Path(path).name
    if Path(path).is_dir():
        if gguf_file is not None and not (Path(path) / gguf_file).is_file():
            raise UserError(f"There is no file {gguf_file} in {path}; correct target.gguf_file= or target.path=.")
        return path, gguf_file
    message = (
        f"The target {given} is neither a folder nor a model on the Hub that can be reached; set target.path= to "
        f"a folder, a Hub id such as org/model, or a .gguf file."
    )
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise UserError(message)
    patterns = ["*.json", "*.jinja", "*.txt", "*.model", "*.py"] + ([gguf_file] if gguf_file else ["*.safetensors"])
    try:
        return snapshot_download(path, allow_patterns=list(only or patterns)), gguf_file
    except HUB_FAULTS as error:
        raise UserError(message) from error


def quiet_transformers() -> None:
    """Loading bars and advice of transformers belong in a log, not between our own lines."""
    from transformers import modeling_gguf_pytorch_utils as gguf_files
    from transformers.utils import logging as transformers_logging

    # PEFT asks transformers by the old name.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    transformers_logging.disable_progress_bar()
    gguf_files.tqdm = transformers_logging.tqdm  # its own bar knows nothing of that switch
    transformers_logging.set_verbosity_error()
    logging.getLogger("transformers").setLevel(logging.ERROR)
