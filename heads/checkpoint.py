"""A trained head as two files: `head.safetensors` (weights and draft vocabulary) and `head.json` (everything else).

`head.json` names the head's class and its constructor arguments, so that no registry is needed and no pickle is read,
and the target that the head belongs to. A head that was adapted (heads.lora) is kept as its adapter alone, with the
digest of the head under it and where that lies; loaded, the two are one head like any other. This module knows neither
training state nor any server's layout.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from heads.artifact import UserError, seal_holds, sealed, write_atomic, write_json
from heads.base import DraftHead
from heads.lora import LoraSettings, adapter_state, add_adapter, fill_adapter, merge
from heads.target import FrozenTarget
from heads.vocab import DraftVocabulary

FORMAT = 1
FACTS, TENSORS = "head.json", "head.safetensors"
FINGERPRINT = ("weights", "tokenizer", "template")
_VOCAB = "vocab.ids_W"
_CLASS = re.compile(r"heads(\.[a-z]\w*)+\.[A-Z]\w*")


def head_name(head: DraftHead) -> str:
    """The kind of a head as reports name it: the file it is written in, such as `eagle3`."""
    return type(head).__module__.rpartition(".")[2]


def class_path(head: DraftHead) -> str:
    """Where the class of a head is, such as `heads.eagle3.Eagle3Head`."""
    return f"{type(head).__module__}.{type(head).__qualname__}"


@dataclass(frozen=True)
class AdapterOf:
    """Of which head an adapter is: its folder, the digest of its weights, and what `add_adapter` was told."""

    folder: Path
    sha256: str
    lora: LoraSettings


def save_head(
    head: DraftHead,
    folder: str | Path,
    *,
    target_fingerprint: Mapping[str, str],
    adapter: AdapterOf | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Write a head into `folder`, beside whatever else lies there; returns its name and the weights' SHA-256.

    adapter: given for a head that carries one, which is then all that is written; extra: numbers about the training,
    kept as they are. Raises UserError when a weight is not finite.
    """
    folder = Path(folder)
    tensors = head.state_dict() if adapter is None else adapter_state(head)
    assert tensors and _VOCAB not in tensors
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    check_finite(state)
    if adapter is None:
        data = save(state | {_VOCAB: head.vocab.ids_W.cpu().contiguous()})
    else:  # with these inside, the file's own digest stands for the merged head; one key, as safetensors shuffles them
        data = save(state, metadata={"adapter": f"of {adapter.sha256} times {adapter.lora.alpha / adapter.lora.rank}"})
    sha256 = hashlib.sha256(data).hexdigest()
    facts = {
        "format": FORMAT,
        "_target_": class_path(head),
        "arguments": head.arguments,
        "vocab_size": head.vocab.size,
        "target": dict(target_fingerprint),
        "sha256": sha256,
        **({} if adapter is None else {"adapter": _adapter_facts(adapter, folder)}),
        "extra": dict(extra or {}),
    }
    write_atomic(folder / TENSORS, data)
    write_json(folder / FACTS, sealed(facts))
    return {"name": head_name(head), "sha256": sha256}


def _adapter_facts(adapter: AdapterOf, folder: Path) -> dict[str, Any]:
    # Relative, so that runs/ can be moved as a whole.
    base = os.path.relpath(adapter.folder.resolve(), folder.resolve())
    return {"base": base, "base_sha256": adapter.sha256, "lora": asdict(adapter.lora)}


def load_head(folder: str | Path, *, target: FrozenTarget | None = None) -> DraftHead:
    """The head in `folder`, bit for bit as it was saved and in eval mode; `attach` and `to` are the caller's.

    An adapter comes merged into the head that it was trained on, in the number format that it was trained in. target:
    the target it is going to be used with. Raises UserError when the head was trained for another one, when anything in
    the folder is missing, superfluous or misshapen, and when the head under an adapter is not the one it was made for.
    """
    folder = Path(folder)
    facts = read_facts(folder)
    if target is not None:
        check_target(facts["target"], target.fingerprint, what=f"The head in {folder}")
    tensors = _read_tensors(folder, facts["sha256"])
    if "adapter" in facts:
        return _merged(folder, facts, tensors)
    if _VOCAB not in tensors:
        raise UserError(f"{folder / TENSORS} has no draft vocabulary ({_VOCAB}); train or convert the head again.")
    vocab = DraftVocabulary(tensors.pop(_VOCAB), facts["vocab_size"])
    head = build_head(facts["_target_"], facts["arguments"], vocab, source=str(folder / FACTS))
    fill(head, tensors, source=str(folder / TENSORS))
    return head.eval()


def _merged(folder: Path, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> DraftHead:
    """The head under an adapter with the adapter merged into it."""
    adapter = facts["adapter"]
    base, wanted = Path(os.path.normpath(folder / adapter["base"])), adapter["base_sha256"]
    if not (base / FACTS).is_file():
        raise UserError(
            f"{folder} holds an adapter of the head in {base}, which is not there; copy that head there again (its "
            f"weights are {wanted[:12]})."
        )
    if (found := str(read_facts(base)["sha256"])) != wanted:
        raise UserError(
            f"{folder} holds an adapter of the head {wanted[:12]}, but {base} holds the head {found[:12]}; put the "
            f"former back there, or adapt the latter anew."
        )
    under = load_head(base)
    head = build_head(facts["_target_"], facts["arguments"], under.vocab, source=str(folder / FACTS))
    fill(head, under.state_dict(), source=str(base / TENSORS))
    head.to(next(iter(tensors.values())).dtype)
    add_adapter(head, LoraSettings(**adapter["lora"]))
    _check_names(adapter_state(head), tensors, source=str(folder / TENSORS))
    fill_adapter(head, tensors)
    merge(head)
    return head.requires_grad_(True).eval()


def copy_head(source: str | Path, folder: str | Path) -> dict[str, Any]:
    """Put the head of one folder into another, an adapter with the way to its base; returns its `head.json`.

    Raises UserError when the source is not as it was written.
    """
    source, folder = Path(source), Path(folder)
    facts = {key: value for key, value in read_facts(source).items() if key != "digest"}
    if "adapter" in facts:
        base = (source / facts["adapter"]["base"]).resolve()
        facts["adapter"] = {**facts["adapter"], "base": os.path.relpath(base, folder.resolve())}
    write_atomic(folder / TENSORS, _read_bytes(source, facts["sha256"]))
    write_json(folder / FACTS, sealed(facts))
    return facts


def read_facts(folder: str | Path) -> dict[str, Any]:
    """`head.json` of a folder. Raises UserError when there is none, it is of another format, or was changed."""
    path = Path(folder) / FACTS
    if not path.is_file():
        raise UserError(f"{folder} holds no trained head (no {FACTS}); give the folder that training wrote.")
    try:
        facts = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); train or convert the head again.") from error
    needed = ("_target_", "arguments", "vocab_size", "target", "sha256")
    if not isinstance(facts, dict) or facts.get("format") != FORMAT or any(key not in facts for key in needed):
        raise UserError(f"{path} is not a head of format {FORMAT}; train or convert it with this version.")
    if not seal_holds(facts):
        raise UserError(f"{path} changed after it was written; copy it again, or train or convert the head again.")
    return facts


def check_target(trained: Mapping[str, str], given: Mapping[str, str], *, what: str) -> None:
    """Raises UserError naming both targets and the parts that differ: weights, tokenizer or chat template."""
    differing = [part for part in FINGERPRINT if trained.get(part) != given.get(part)]
    if differing:
        pairs = ", ".join(f"{part} {_short(trained, part)} against {_short(given, part)}" for part in differing)
        raise UserError(
            f"{what} belongs to the target {trained.get('name')!r}, but {given.get('name')!r} was given: they "
            f"differ in {pairs}; set target.path= to the former or train a head for the latter."
        )


def fill(head: DraftHead, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Put tensors into a head, keeping their dtype. Raises UserError naming the first one that does not belong."""
    _check_names(head.state_dict(), tensors, source=source)
    head.load_state_dict(dict(tensors), assign=True)


def _check_names(wanted: Mapping[str, Tensor], tensors: Mapping[str, Tensor], *, source: str) -> None:
    problems = [f"lacks {name} {list(wanted[name].shape)}" for name in wanted if name not in tensors]
    problems += [f"has {name}, which the head has not" for name in tensors if name not in wanted]
    problems += [
        f"has {name} {list(tensor.shape)} where the head has {list(wanted[name].shape)}"
        for name, tensor in tensors.items()
        if name in wanted and tensor.shape != wanted[name].shape
    ]
    if problems:
        more = f" ({len(problems)} such faults)" if len(problems) > 1 else ""
        raise UserError(f"{source} {problems[0]}{more}; give the folder of a head of this kind and size.")


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raises UserError naming the first tensor with an infinity or a NaN in it."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise UserError(f"The weight {name} is not finite; go back to an earlier checkpoint of the training.")


def _short(fingerprint: Mapping[str, str], part: str) -> str:
    return str(fingerprint.get(part))[:12]


def _read_bytes(folder: Path, sha256: str) -> bytes:
    path = folder / TENSORS
    if not path.is_file():
        raise UserError(f"{folder} has a {FACTS} but no {TENSORS}; copy both, or train again.")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise UserError(
            f"{path} is not the file that {FACTS} describes (changed or cut off); copy both or train again."
        )
    return data


def _read_tensors(folder: Path, sha256: str) -> dict[str, Tensor]:
    data = _read_bytes(folder, sha256)
    try:
        return load(data)
    except SafetensorError as error:
        raise UserError(f"{folder / TENSORS} is not a safetensors file ({error}); train again.") from error


def build_head(kind: str, arguments: Mapping[str, Any], vocab: DraftVocabulary, *, source: str) -> DraftHead:
    """An untrained head of the named class, which must be one of this package. UserError names the source."""
    refusal = f"{source} names the class {kind!r}, which is no draft head under heads."
    if not isinstance(kind, str) or not _CLASS.fullmatch(kind):
        raise UserError(f"{refusal}; nothing outside is ever loaded.")
    module_name, _, name = kind.rpartition(".")
    try:
        found = vars(importlib.import_module(module_name)).get(name)
    except ModuleNotFoundError as error:
        raise UserError(f"{refusal}; it was written by another version.") from error
    if not (isinstance(found, type) and issubclass(found, DraftHead)):
        raise UserError(f"{refusal}; it was written by another version.")
    try:
        return found(vocab=vocab, **arguments)
    except UserError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, RuntimeError, StrictDataclassError) as error:
        raise UserError(f"{source} does not fit {kind} ({error}); it is from another version.") from error
