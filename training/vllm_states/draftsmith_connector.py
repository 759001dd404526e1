"""vLLM's hidden-state connector for a machine without CUDA; imported by vLLM's own processes.

vLLM's example connector copies on a CUDA stream into pinned memory and writes in threads. Here the states lie in main
memory already: they are read out of the cache blocks and written at once, each request under its name when it is whole.
"""

from __future__ import annotations

import os

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class PlainHiddenStatesConnector(ExampleHiddenStatesConnector):
    """The example connector with its writing done at once, by the process that computes."""

    def wait_for_save(self) -> None:
        """Nothing is to be locked: a file is there when it is whole."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Write what has just been finished, and report it, so that its blocks are free again."""
        self._accumulated_finished_req_ids.update(finished_req_ids)
        if not self.has_connector_metadata():
            return None, None
        saved = {pending.req_id for pending in self._get_connector_metadata().pending_saves if self._save(pending)}
        self._accumulated_finished_req_ids -= saved
        return saved or None, None

    def _save(self, pending: PendingSave) -> bool:
        """Write one request's states [tokens, boundaries, D] with its token ids."""
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).contiguous()
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        temporary = pending.filename + ".tmp"
        save_file({"hidden_states": states, "token_ids": pending.token_ids.clone()}, temporary)
        os.replace(temporary, pending.filename)
        return True
