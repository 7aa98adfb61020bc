"""`python -m jaxrl_llm export --checkpoint RUN --out DIR`: a run as a Hugging Face folder or GGUF file."""

from __future__ import annotations

import shlex
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.hub import SUFFIX, PushError, check_repository, push_folder
from jaxrl_llm.host.command import working
from jaxrl_llm.tools.arguments import parse_arguments
from jaxrl_llm.tools.config import ExportArguments


def main(argv: list[str]) -> int:
    """Write the folder or the GGUF file, and print its size.

    Raises:
        UserError: no usable checkpoint or tokenizer, the folder or file cannot be written or replaced, a GGUF
            file cannot express the model, or the hub refuses the repository.
        PushError: the upload failed; the folder is complete.
    """
    args = parse_arguments(ExportArguments, argv, "export")
    as_gguf = args.out.suffix == SUFFIX
    _check_flags(args, as_gguf)
    # These import jax: --help and bad flags end before.
    from jaxrl_llm.builders.exports import carried_parts, model_card
    from jaxrl_llm.checkpoint.params import restore_params
    from jaxrl_llm.hf.export import check_export_folder, save_model
    from jaxrl_llm.hf.gguf_export import check_gguf_file, save_gguf
    from jaxrl_llm.host.devices import open_devices
    from jaxrl_llm.models.lora import base_config
    from jaxrl_llm.models.params import with_heads
    from jaxrl_llm.tools.models import exported_config, run_settings, run_tokenizer, with_base

    # The target, before weights are read.
    open_devices()
    if as_gguf:
        check_gguf_file(args.out, args.overwrite)
    else:
        check_export_folder(args.out)
        if not args.overwrite and args.out.exists() and any(args.out.iterdir()):
            raise UserError(f"--out {args.out}: exists. Set another --out, or --overwrite True.")
    # Adapters are merged into the base.
    saved = restore_params(args.checkpoint, args.step, args.ema)
    params = with_heads(with_base(args.checkpoint, saved), exported_config(args.checkpoint, saved))
    config = base_config(params.config)
    tokenizer = run_tokenizer(args.checkpoint, config, args.tokenizer)
    with working(f"writing {args.out}"):
        if as_gguf:
            folder = save_gguf(params, config, args.out, tokenizer, dtype=args.dtype)
        else:
            base = run_settings(args.checkpoint)["model"]["path"]
            carried = carried_parts(base, config) if args.carry else None
            folder = save_model(params, config, args.out, tokenizer, dtype=args.dtype, carried=carried)
    size = sum(file.stat().st_size for file in (folder.iterdir() if folder.is_dir() else [folder]))
    print(f"step {saved.step} of {args.checkpoint} -> {folder} ({args.dtype}, {size / 2**20:,.1f} MiB)")
    if as_gguf:
        _write_modelfile(args, tokenizer)
    if args.push:
        card, message = model_card(args.checkpoint, args.push, folder), f"Checkpoint of step {saved.step}"
        try:
            print(f"pushed to {push_folder(folder, args.push, args.private, card, message=message)}")
        except PushError as error:
            raise PushError(f"{folder} is complete, but is not on the hub: {error}") from error
    return 0


def _check_flags(args: ExportArguments, as_gguf: bool) -> None:
    """Refuse flags that exclude each other, and a repository that cannot be pushed to."""
    if args.dtype == "q8_0" and not as_gguf:
        raise UserError(f"--dtype q8_0 is a type of GGUF files: set --out {args.out}{SUFFIX}")
    if args.push and as_gguf:
        raise UserError(f"--push uploads a Hugging Face folder, but --out {args.out} is a GGUF file")
    if args.push:
        check_repository(args.push, args.private)


def _write_modelfile(args: ExportArguments, tokenizer: Any) -> None:
    """Write a Modelfile with the sampling of the run, and print Ollama's command."""
    from jaxrl_llm.hf.gguf_export import write_modelfile
    from jaxrl_llm.tools.models import run_settings

    sampling = run_settings(args.checkpoint)["rollout"]["sampling"]
    path = write_modelfile(args.out, tokenizer, sampling["temperature"], tuple(sampling["stop"]))
    print(f"for Ollama: ollama create NAME -f {shlex.quote(str(path))}")
