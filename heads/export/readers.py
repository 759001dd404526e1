"""Readers of heads beside vLLM, none of which has run here: SGLang, the authors' code, TensorRT-LLM and llama.cpp."""

from __future__ import annotations

import json
import shlex

from heads.export.card import ServeFacts, Serving
from heads.export.format import Format
from heads.export.paper import (
    PaperEagle3Layout,
    PaperEagleLayout,
    PaperMedusaLayout,
    SGLangMTPLayout,
    TensorRTMedusaLayout,
)
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
    note = f"Another γ is another `num-steps`, with `num-draft-tokens` one more. {_COUNTERS}"
    return Serving("sglang", f"python -m sglang.launch_server {words}", note, ran=False)


def original(facts: ServeFacts) -> Serving:
    """The line of Python that loads it in its authors' repository."""
    if facts.method == "medusa":
        load = f"from medusa.model.medusa_model import MedusaModel; MedusaModel.from_pretrained({facts.folder!r})"
        note = "The repository is FasterDecoding/Medusa."
    else:
        paths = f"base_model_path={facts.target!r}, ea_model_path={facts.folder!r}"
        which = f"use_eagle3={facts.method == 'eagle3'}"
        load = f"from eagle.model.ea_model import EaModel; EaModel.from_pretrained({which}, {paths})"
        note = "The repository is SafeAILab/EAGLE."
    return Serving("pytorch", f"python -c {shlex.quote(load)}", note, ran=False)


def tensorrt_llm(facts: ServeFacts) -> Serving:
    """EAGLE-3 by the PyTorch backend. JSON is YAML, so the options fit on the line."""
    if facts.method == "medusa":
        return tensorrt_medusa(facts)
    config = {"decoding_type": "Eagle3", "max_draft_len": facts.gamma, "speculative_model": facts.folder}
    options = json.dumps({"speculative_config": {**config, **facts.overrides}})
    command = f"trtllm-serve {shlex.quote(facts.target)} --extra_llm_api_options <(echo {shlex.quote(options)})"
    note = f"The options are those of TensorRT-LLM 1.4; older ones have `speculative_model_dir`. {_COUNTERS}"
    return Serving("tensorrt-llm", command, note, ran=False)


def tensorrt_medusa(facts: ServeFacts) -> Serving:
    """Medusa by an engine that is built first, with a chain of γ first choices."""
    engine, chain = f"{facts.folder}.engine", [[0] * length for length in range(1, facts.gamma + 1)]
    convert = {
        "model_dir": facts.target,
        "medusa_model_dir": facts.folder,
        "output_dir": f"{facts.folder}.trtllm",
        "dtype": facts.dtype,
        **facts.overrides,
    }
    build = {
        "checkpoint_dir": f"{facts.folder}.trtllm",
        "output_dir": engine,
        "gemm_plugin": facts.dtype,
        "speculative_decoding_mode": "medusa",
        "max_batch_size": 4,
    }
    ask = {
        "engine_dir": engine,
        "tokenizer_dir": facts.target,
        "medusa_choices": json.dumps(chain),
        "temperature": 1.0,
        "max_output_len": 100,
        "input_text": "Once upon",
    }
    steps = {"python convert_checkpoint.py": convert, "trtllm-build": build, "python ../run.py": ask}
    lines = [
        " ".join([program, *(f"--{name} {shlex.quote(str(value))}" for name, value in options.items())])
        for program, options in steps.items()
    ]
    note = (
        "Run it in examples/medusa of TensorRT-LLM with absolute paths: its engines decode with Medusa, greedily, its "
        "PyTorch backend does not. The converter takes targets of the Llama and Mixtral families, and of Qwen2 with "
        "`--model_type qwen2`."
    )
    return Serving("tensorrt-llm", "\n".join(lines), note, ran=False)


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
        SGLangMTPLayout(),
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
    (
        PaperEagle3Layout("TensorRT-LLM", "eagle3", flags=("fc_norm", "norm_output"), taps="told"),
        TensorRTMedusaLayout("TensorRT-LLM"),
    ),
    tensorrt_llm,
)
LLAMA_CPP = Format(
    "llama_cpp",
    "llama_cpp",
    "llama.cpp",
    (PaperEagle3Layout("llama.cpp", "eagle3", flags=("norm_before_residual",)),),
    llama_cpp,
)
