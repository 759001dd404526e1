"""Readers of heads beside vLLM, none of which has run here: SGLang, the authors' code, TensorRT-LLM and llama.cpp."""

from __future__ import annotations

import json
import shlex

from heads.export.card import ServeFacts, Serving
from heads.export.format import Format
from heads.export.paper import PaperEagle3Layout, PaperEagleLayout, PaperMedusaLayout
from heads.export.weights import PICKLED

_AUTHORS, _OLD_ROPES = "the authors' code", ("default", "linear", "dynamic")
_COUNTERS = "Whether the head works shows in the acceptance length that the server logs, never in the text."


def sglang(facts: ServeFacts) -> Serving:
    """Chains: one candidate a step, and the verified tokens are γ and the root."""
    options = {
        "model-path": facts.target,
        "speculative-algorithm": facts.method,
        "speculative-draft-model-path": facts.folder,
        "speculative-num-steps": facts.gamma,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": facts.gamma + 1,
    }
    words = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in options.items())
    return Serving("sglang", f"python -m sglang.launch_server {words}", _COUNTERS, ran=False)


def original(facts: ServeFacts) -> Serving:
    """The line of Python that loads it in its authors' repository."""
    if facts.method == "medusa":
        load = f"from medusa.model.medusa_model import MedusaModel; MedusaModel.from_pretrained({facts.folder!r})"
        note = (
            f"The repository is FasterDecoding/Medusa; TensorRT-LLM's converter takes the folder too (examples/medusa, "
            f"`--medusa_model_dir {shlex.quote(facts.folder)}`)."
        )
    else:
        paths = f"base_model_path={facts.target!r}, ea_model_path={facts.folder!r}"
        which = f"use_eagle3={facts.method == 'eagle3'}"
        load = f"from eagle.model.ea_model import EaModel; EaModel.from_pretrained({which}, {paths})"
        note = "The repository is SafeAILab/EAGLE."
    return Serving("pytorch", f"python -c {shlex.quote(load)}", note, ran=False)


def tensorrt_llm(facts: ServeFacts) -> Serving:
    """JSON is YAML, so the options fit on the line."""
    config = {"decoding_type": "Eagle3", "max_draft_len": facts.gamma, "speculative_model": facts.folder}
    options = json.dumps({"speculative_config": {**config, **facts.overrides}})
    command = f"trtllm-serve {shlex.quote(facts.target)} --extra_llm_api_options <(echo {shlex.quote(options)})"
    note = f"The options are those of TensorRT-LLM 1.4; older ones have `speculative_model_dir`. {_COUNTERS}"
    return Serving("tensorrt-llm", command, note, ran=False)


def llama_cpp(facts: ServeFacts) -> Serving:
    """llama.cpp's own converter makes the GGUF file, for it takes the target's tokenizer into it."""
    folder, target = shlex.quote(facts.folder), shlex.quote(facts.target)
    draft, model = shlex.quote(f"{facts.folder}.gguf"), shlex.quote(f"{facts.target}.gguf")
    convert = f"python convert_hf_to_gguf.py {folder} --target-model-dir {target} --outtype bf16 --outfile {draft}"
    serve = f"llama-server -m {model} -md {draft} --spec-type draft-eagle3 --spec-draft-n-max {facts.gamma}"
    note = f"The target's own GGUF file is made by the same script. {_COUNTERS}"
    return Serving("llama.cpp", f"{convert}\n{serve}", note, ran=False)


SGLANG = Format(
    "sglang",
    "sglang",
    "SGLang",
    (
        PaperEagle3Layout("SGLang", "EAGLE3", taps="config"),
        PaperEagleLayout("SGLang", "EAGLE", "LlamaForCausalLMEagle", bias=True),
    ),
    sglang,
)
ORIGINAL = Format(
    "original",
    "original",
    "the authors' code",
    (
        PaperEagle3Layout(_AUTHORS, "eagle3", ropes=_OLD_ROPES, file=PICKLED),
        PaperEagleLayout(_AUTHORS, "eagle", "LlamaForCausalLM", embeddings=True, ropes=_OLD_ROPES, file=PICKLED),
        PaperMedusaLayout(_AUTHORS, blocks=1),
    ),
    original,
)
TENSORRT_LLM = Format(
    "tensorrt_llm",
    "tensorrt_llm",
    "TensorRT-LLM",
    (PaperEagle3Layout("TensorRT-LLM", "eagle3", flags=("fc_norm", "norm_output"), taps="told"),),
    tensorrt_llm,
)
LLAMA_CPP = Format(
    "llama_cpp",
    "llama_cpp",
    "llama.cpp",
    (PaperEagle3Layout("llama.cpp", "eagle3", flags=("norm_before_residual",)),),
    llama_cpp,
)
