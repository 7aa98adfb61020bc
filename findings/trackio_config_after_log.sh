#!/bin/sh
# trackio 0.43.0 drops what is added to a run's config after the first log, without a warning: the config is sent
# with the first step after the start alone. And it continues a run by its name: with resume="allow" it takes the
# newest run of that name, whosever it is; init has no id.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "trackio==0.43.0"
cd "$folder"
TRACKIO_DIR="$folder/data" "$folder/venv/bin/python" - <<'END'
import json
import sqlite3
import sys

import trackio


def start(resume):
    return trackio.init(project="p", name="run", resume=resume, embed=False)


first = start("never")
first.config.update({"before": 1})
first.log({"loss": 0.5}, step=1)
first.config.update({"after": 2})
first.log({"loss": 0.25}, step=2)
first.finish()
second = start("never")
second.log({"loss": 1.0}, step=1)
second.finish()
resumed = start("allow")
resumed.finish()
with sqlite3.connect("data/p.db") as file:
    query = "SELECT config FROM configs WHERE run_id = ?"
    config = json.loads(file.execute(query, (first.id,)).fetchone()[0])
print("config:", {key: value for key, value in config.items() if not key.startswith("_")})
print("resumed the first run:", resumed.id == first.id, "the second:", resumed.id == second.id)
sys.exit(not ("before" in config and "after" not in config and resumed.id == second.id))
END
