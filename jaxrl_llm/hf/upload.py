"""Upload of exported folders to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from jaxrl_llm.errors import RunError, UserError
from jaxrl_llm.hf.hub_name import HubName, parse_hub_name


def check_upload(key: str, name: str) -> HubName:
    """Return the repository that a folder can be uploaded to; asks no server.

    Args:
        key: flag that the name was given with.
        name: "org/model", or "org/model@branch".

    Raises:
        UserError: it is no such name, or there is no token of the hub.
    """
    from huggingface_hub import get_token  # slow, and not needed otherwise

    hub = parse_hub_name(name)
    if hub is None or hub.file or Path(name).exists():
        raise UserError(f"--{key} {name}: no hub name. Set one such as my-name/my-model.")
    if not get_token():
        raise UserError(
            f"--{key} {name}: there is no token of the hub. Run `hf auth login`, or set HF_TOKEN."
        )
    return hub


def upload_folder(folder: Path, hub: HubName, message: str) -> str:
    """Upload the files of a folder as one commit; return its URL. A new repository is private.

    Raises:
        RunError: the hub refuses it, or there is no network; the folder stays.
    """
    from huggingface_hub import HfApi

    api, branch = HfApi(), {"revision": hub.revision} if hub.revision else {}
    try:
        api.create_repo(hub.repo, private=True, exist_ok=True)
        if hub.revision:
            api.create_branch(hub.repo, branch=hub.revision, exist_ok=True)
        commit = api.upload_folder(repo_id=hub.repo, folder_path=folder, commit_message=message, **branch)
    except Exception as error:  # any error of the network or the hub
        reason = str(error).splitlines()[0] if str(error) else "no message"
        raise RunError(
            f"{folder} is not on the hub as {hub} ({type(error).__name__}: {reason}). Upload it later: "
            f"hf upload {hub.repo} {folder}"
        ) from error
    return commit.commit_url
