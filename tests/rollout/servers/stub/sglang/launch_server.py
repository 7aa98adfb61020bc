"""`python -m sglang.launch_server` of the tests: the fake server."""

import argparse
import logging
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[4]))
from fake_sglang import FakeServer

logging.basicConfig()
logging.warning("arguments: %s", sys.argv[1:])  # as SGLang does
parser = argparse.ArgumentParser()
parser.add_argument("--model-path")
parser.add_argument("--port", type=int)
parser.add_argument("--enable-return-routed-experts", action="store_true")
options, _ = parser.parse_known_args()
assert (Path(options.model_path) / "config.json").is_file()
FakeServer(options.port, Path(options.model_path)).reports_routes = options.enable_return_routed_experts
print("the fake server is up", flush=True)
threading.Event().wait()
