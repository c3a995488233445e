#!/usr/bin/env bash
# Makes a virtual environment that has what another has, and installs a package with extras over it; what the extras need
# in another version stands before the other's: install_over.sh .venv .venv-interop/games ".[textarena]".
set -euo pipefail
base=$1
venv=$2
package=$3
[ -x "$venv/bin/python" ] || "$base/bin/python" -m venv "$venv"
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
site "$base" > "$(site "$venv")/base.pth"
"$venv/bin/pip" install --quiet --editable "$package"
