#!/bin/sh
# AutoTokenizer of transformers 5.24 ignores the pipeline of tokenizer.json where a folder has LlamaTokenizer.
# The file may put a space before a text ("Prepend", as in Llama 2), so that " Hi" has two word starts. The
# tokenizers library gives both, and so did transformers 4.57.6; 5.24 makes a pipeline from the class, which
# gives one. It does so for other classes, too (Qwen2Tokenizer), without a line.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "transformers==5.24.0" "tokenizers==0.23.3"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder/model" <<'EOF'
import json
import pathlib
import sys

import tokenizers
import transformers
from tokenizers import Tokenizer, models, normalizers

print("transformers", transformers.__version__, "tokenizers", tokenizers.__version__)
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
tokens = ["<unk>", "<s>", "</s>", "\u2581", "H", "i", "\u2581H", "\u2581Hi"]
vocabulary = {token: number for number, token in enumerate(tokens)}
merges = [("\u2581", "H"), ("\u2581H", "i")]
made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True))
made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
made.add_special_tokens(["<unk>", "<s>", "</s>"])
made.save(str(folder / "tokenizer.json"))
(folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
(folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
loaded = transformers.AutoTokenizer.from_pretrained(folder)
by_class = loaded.convert_ids_to_tokens(loaded.encode(" Hi", add_special_tokens=False))
by_file = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(" Hi", add_special_tokens=False).tokens
print(f"{type(loaded).__name__}: {by_class}; tokenizer.json: {by_file}")
sys.exit(not (by_class == ["\u2581Hi"] and by_file == ["\u2581", "\u2581Hi"]))
EOF
