#!/bin/sh
# Prints the path of the newest CPython from 3.11 to 3.13 on PATH or in pyenv; nothing if there is none.
for minor in 13 12 11; do
    for candidate in "$(command -v python3.$minor 2>/dev/null)" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor".*/bin/python; do
        if [ -n "$candidate" ] && [ -x "$candidate" ] && "$candidate" -c "import sys; sys.exit(sys.version_info[1] != $minor)" 2>/dev/null; then
            echo "$candidate"
            exit 0
        fi
    done
done
