#!/usr/bin/env bash
# Makes a virtual environment and installs the package with its extras: install.sh VENV ".[test]".
# torch comes first and pinned, so that whatever depends on it takes the build that is there. TORCH="" skips it, for an
# image or environment that brings its own.
set -euo pipefail
venv=$1
package=$2
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
if [ -n "${TORCH-torch==2.13.0}" ]; then
    "$venv/bin/pip" install --quiet "${TORCH-torch==2.13.0}"
fi
"$venv/bin/pip" install --quiet --editable "$package"
