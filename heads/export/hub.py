"""A finished export to a repository on the Hub, with the account that huggingface_hub is logged in with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from heads.artifact import MANIFEST, UserError
from heads.target_files import HUB_FAULTS


def push(folder: str | Path, repository: str, manifest: Mapping[str, Any]) -> str:
    """Upload the files of an export and its manifest in one commit; returns where it is.

    A repository that does not exist is made, for its owner's eyes only. Raises UserError when the Hub refuses, or
    cannot be reached.
    """
    api = HfApi()
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        files = [*manifest["files"], MANIFEST]
        done = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=files,
            commit_message=f"{manifest['head']['name']} draft head for {manifest['target']['name']}",
        )
    except HUB_FAULTS as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(". ")
        refused = isinstance(error, (HfHubHTTPError, HFValidationError))
        remedy = (
            "give org/name of a repository that you may write to, log in with `hf auth login`"
            if refused
            else f"{HfApi().endpoint} cannot be reached, so mend the connection"
        )
        raise UserError(
            f"push={repository} failed ({reason}); the export itself is finished, in {folder}: {remedy}, and repeat "
            f"the command to push it."
        ) from error
    return str(done.commit_url)
