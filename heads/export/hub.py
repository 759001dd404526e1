"""A finished export to a repository on the Hub, with the account that huggingface_hub is logged in with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # the one it asks with, by whatever name

from heads.artifact import MANIFEST, UserError


def push(folder: str | Path, repository: str, manifest: Mapping[str, Any]) -> str:
    """Upload the files of an export and its manifest in one commit; returns where it is.

    A repository that does not exist is made, for its owner's eyes only. Raises UserError when the Hub refuses.
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
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, httpx.HTTPError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"push={repository} failed ({reason}); give org/name of a repository that you may write to, and log in "
            f"with `hf auth login`. The export itself is in {folder}."
        ) from error
    return str(done.commit_url)
