"""Names of models in recipes -> local folders: folders, GGUF files, repositories of the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.gguf import convert_gguf
from jaxrl_llm.hf.hub import SUFFIX, HubName, hub_model, hub_spelling, parse_hub_name
from jaxrl_llm.host.command import working
from jaxrl_llm.user_file import expand_home

_DOWNLOAD = ["*.safetensors", "*.json", "*.txt", "*.jinja", "*.model"]
_SKIP = ["*/*", "consolidated*"]  # other formats' copies of the same weights
_COMMIT = re.compile(r"[0-9a-f]{40}")


def resolve_model(name: str | Path, adapter: bool = False) -> Path:
    """Return a local model folder: the given folder, a converted GGUF file, or a download from the hub.

    Args:
        name: folder, GGUF file or hub name: "org/model", "org/model@revision", "org/model/file.gguf".
        adapter: the name is of adapters, a PEFT folder.

    Raises:
        UserError: the name is none of these; see also `convert_gguf`.
    """
    try:
        path = expand_home(name)
        is_folder, is_file, is_run = path.is_dir(), path.exists(), _is_run(path)
    except (OSError, ValueError) as error:  # an overlong name, a NUL, a lone surrogate
        raise UserError(f"{str(name)[:80]!r}: not the name of a folder ({error})") from error
    # Something local: a folder, a GGUF file, or a path that is neither.
    if is_folder and (is_run or not adapter) and (other := other_folder(path)):
        raise UserError(f"{path}: {other}")
    if is_folder:
        return path
    if is_file and path.suffix == SUFFIX:
        return _converted(path)
    if is_file:
        raise UserError(
            f"{path}: a file, but a model is a folder (config.json and *.safetensors) or a GGUF file"
        )
    # Something on the hub.
    hub = parse_hub_name(str(name))
    if hub is None and (spelling := hub_spelling(str(name))):
        raise UserError(f"{name}: a model of the hub is written {spelling}")
    if hub is None:
        kind = "file" if path.suffix == SUFFIX else "folder"
        raise UserError(
            f"{path.absolute()}: no such {kind}; give a model folder, a GGUF file or a hub name (org/model)"
        )
    downloaded = _download(hub, path)
    return _converted(downloaded) if hub.file else downloaded


def _converted(file: Path) -> Path:
    with working(f"converting {file.name} to a Hugging Face folder, once"):
        return convert_gguf(file)


def other_folder(path: Path) -> str:
    """Return the kind of a folder that is not a model, and a replacement to give; "" if it may be one.

    A run directory has a config.json, too, which is not a model's.
    """
    if _is_run(path):
        return _run_directory(path)
    if (path / "config.json").is_file():
        return ""
    if (path / "hf" / "config.json").is_file():
        return f"not a model, but contains one: {path / 'hf'}"
    if (path / "adapter_config.json").is_file():
        merged = path.with_name(path.name.replace("adapter", "hf"))
        has_merged = merged != path and (merged / "config.json").is_file()
        return (
            "adapters (PEFT) without their model: give the base model, with --model.adapter in training or "
            f"--adapter in chat, generate and score{f'; merged they are {merged}' * has_merged}"
        )
    run = next((parent.parent for parent in (path, *path.parents) if parent.name == "checkpoints"), None)
    if run and (run / "metrics.jsonl").is_file():
        return f"a checkpoint of the run {run}, not a Hugging Face folder: {_export_command(run)}"
    return ""


def pin_revision(name: str) -> str:
    """Return a hub name with the present commit of its revision; other names unchanged.

    A run keeps the pinned name, so that it continues with the same weights if the hub's change.
    """
    hub = hub_model(name)
    if hub is None:
        return name
    if _COMMIT.fullmatch(hub.revision or ""):
        return str(hub)
    folder = _download(hub, expand_home(name))
    commit = next((part for part in reversed(folder.parts) if _COMMIT.fullmatch(part)), None)
    return str(hub._replace(revision=commit)) if commit else name


def _download(hub: HubName, path: Path) -> Path:
    """Return the downloaded folder, or GGUF file, in the hub's cache."""
    from huggingface_hub import hf_hub_download, snapshot_download  # slow, and not needed for a local folder

    revision = {"revision": hub.revision} if hub.revision else {}
    try:
        with working(f"downloading {hub} from the hub"):
            if hub.file:
                return Path(hf_hub_download(hub.repo, hub.file, **revision))
            return Path(
                snapshot_download(hub.repo, allow_patterns=_DOWNLOAD, ignore_patterns=_SKIP, **revision)
            )
    except Exception as error:  # any error of the network, the hub or its cache
        raise UserError(
            f"{hub}: no folder {path.absolute()}, and the hub has not delivered it "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}). "
            "Check the name; without a network, copy the model here and give its folder."
        ) from error


def _is_run(path: Path) -> bool:
    return (path / "checkpoints").is_dir() and (path / "metrics.jsonl").is_file()


def _run_directory(path: Path) -> str:
    if (path / "hf" / "config.json").is_file():
        return f"a run directory; its trained model is {path / 'hf'}"
    return (
        "a run directory, of a run that has not exported its model. Continue the run, or "
        f"{_export_command(path)}"
    )


def _export_command(run: Path) -> str:
    command = f"python -m jaxrl_llm export --checkpoint {run} --out FOLDER"
    return f"export a checkpoint ({command}) and give that folder."
