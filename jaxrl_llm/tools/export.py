"""`python -m jaxrl_llm export --checkpoint RUN --out DIR`: a Hugging Face folder from a run's checkpoint."""

from __future__ import annotations

from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.hub import PushError, check_repository, push_folder
from jaxrl_llm.host.command import working
from jaxrl_llm.tools.arguments import parse_arguments
from jaxrl_llm.tools.config import ExportArguments


def main(argv: list[str]) -> int:
    """Write the folder and print its size.

    Raises:
        UserError: no usable checkpoint or tokenizer, the folder cannot be written or replaced, or the hub
            refuses the repository.
        PushError: the upload failed; the folder is complete.
    """
    args = parse_arguments(ExportArguments, argv, "export")
    if args.push:
        check_repository(args.push, args.private)
    from jaxrl_llm.builders.exports import model_card  # these import jax: --help and bad flags end before
    from jaxrl_llm.checkpoint.params import restore_params
    from jaxrl_llm.hf.export import check_export_folder, save_model
    from jaxrl_llm.host.devices import open_devices
    from jaxrl_llm.models.lora import base_config
    from jaxrl_llm.models.params import with_heads
    from jaxrl_llm.tools.models import exported_config, run_tokenizer, with_base

    open_devices()
    check_export_folder(args.out)
    if not args.overwrite and args.out.exists() and any(args.out.iterdir()):
        raise UserError(f"--out {args.out}: exists. Set another --out, or --overwrite True.")
    # Adapters are merged into the base.
    saved = restore_params(args.checkpoint, args.step, args.ema)
    params = with_heads(with_base(args.checkpoint, saved), exported_config(args.checkpoint, saved))
    config = base_config(params.config)
    tokenizer = run_tokenizer(args.checkpoint, config, args.tokenizer)
    with working(f"writing {args.out}"):
        folder = save_model(params, config, args.out, tokenizer, dtype=args.dtype)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"step {saved.step} of {args.checkpoint} -> {folder} ({args.dtype}, {size / 2**20:,.1f} MiB)")
    if args.push:
        card, message = model_card(args.checkpoint, args.push), f"Checkpoint of step {saved.step}"
        try:
            print(f"pushed to {push_folder(folder, args.push, args.private, card, message=message)}")
        except PushError as error:
            raise PushError(f"{folder} is complete, but is not on the hub: {error}") from error
    return 0
