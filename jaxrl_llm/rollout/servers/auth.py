"""Keys and addresses of servers. Keys come from the environment alone: no config, log or `ps` shows them."""

from __future__ import annotations

import contextlib
import ipaddress
import os

from jaxrl_llm.addresses import holds_login, host_of, is_loopback, mask_text
from jaxrl_llm.errors import UserError

API_KEY, ADMIN_KEY = "JAXRL_SERVER_API_KEY", "JAXRL_SERVER_ADMIN_KEY"
FLAGS = {"--api-key": API_KEY, "--admin-api-key": ADMIN_KEY}  # SGLang's flag -> our variable
API_ROUTES = (
    *("/generate", "/model_info", "/server_info", "/load_lora_adapter_from_tensors"),
    *("/inference/v1/generate", "/v1/models", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)
"""Routes for the API key; the others that are used are for admins."""


def server_keys() -> dict[str, str]:
    """Return SGLang's flag -> its value, of the keys that are set.

    Raises:
        UserError: a variable has its earlier name.
    """
    for name in FLAGS.values():
        earlier = name.replace("SERVER", "SGLANG")
        if os.environ.get(earlier) and not os.environ.get(name):
            raise UserError(f"{earlier} is called {name} now: set that variable to the same key")
    return {flag: os.environ[name] for flag, name in FLAGS.items() if os.environ.get(name)}


def request_headers(path: str) -> dict[str, str]:
    """Return the HTTP headers of a request to this route."""
    values = server_keys()
    api, admin = values.get("--api-key", ""), values.get("--admin-api-key", "")
    key = api if path in API_ROUTES else admin or api
    return {"Authorization": f"Bearer {key}"} if key else {}


def address_problem(url: str, engine: str = "sglang") -> str:
    """Return why no server may be used at this address, with the fix; "" = it may.

    vLLM's key guards its /v1 and /inference routes alone: a program that reaches the others can pause the
    server and change its weights.

    Args:
        engine: kind of the server, "sglang" or "vllm".
    """
    is_plain = url.lower().startswith("http:")
    if not (host := host_of(url)):
        return f"{mask_text(repr(url))} is no address; write http://host:port."
    if holds_login(url) or "?" in url or "#" in url:
        return f"the address of {host} holds a password or a parameter: set {API_KEY} instead."
    if engine == "vllm" and is_plain and not is_private(host):
        return (
            f"{url} is plain http to another host, and vLLM's routes for weights take no key. Use the IP "
            "address of a private network, a tunnel to 127.0.0.1, or https with a proxy that demands the key."
        )
    if engine != "vllm" and is_plain and not is_loopback(host) and not server_keys():
        return (
            f"{url} is plain http to another host, and there is no key: anyone who reaches it can change its "
            f"weights. Start it with --api-key and set {API_KEY} (and {ADMIN_KEY}) to it here, or use https."
        )
    return ""


def is_private(host: str) -> bool:
    """Return whether an address is of this machine, or an IP address of a private network."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_private
    return is_loopback(host)
