"""`python -m jaxrl_llm export`: a Hugging Face folder from a run's checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jaxrl_llm.build.run import load_model_config
from jaxrl_llm.checkpoint.params import restore_params
from jaxrl_llm.config import ModelConfig
from jaxrl_llm.hf.export import DTYPES, save_model
from jaxrl_llm.hf.json_file import read_json
from jaxrl_llm.models import TransformerConfig


def main(argv: list[str]) -> int:
    """Write the folder and say what it holds.

    Raises:
        ValueError: no usable checkpoint, no tokenizer, or a place that cannot be written.
    """
    args = parser().parse_args(argv)
    step, params, config = restore_params(args.checkpoint, args.step)
    tokenizer = run_tokenizer(args.checkpoint, config, args.tokenizer)
    folder = save_model(params, config, args.out, tokenizer, args.dtype)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"step {step} of {args.checkpoint} -> {folder} ({args.dtype}, {size / 2**20:,.1f} MiB)")
    return 0


def run_tokenizer(run_dir: Path, config: TransformerConfig, override: str = "") -> Any:
    """The tokenizer a run was trained with, as its config.json names it."""
    model = read_json(run_dir / "config.json")["config"]["model"]
    name = override or model["tokenizer"] or model["path"]
    return load_model_config(ModelConfig(architecture=config, tokenizer=name))[1]


def parser() -> argparse.ArgumentParser:
    text = argparse.ArgumentParser(prog="python -m jaxrl_llm export", description=__doc__)
    text.add_argument("--checkpoint", type=Path, required=True, metavar="RUN", help="directory of the run")
    text.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    text.add_argument("--step", type=int, help="which checkpoint (default: the newest)")
    text.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the weights (%(default)s)")
    text.add_argument("--tokenizer", default="", help="folder or hub name, if the run's own is not there")
    return text
