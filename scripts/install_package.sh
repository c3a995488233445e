#!/usr/bin/env bash
# A program that some tests need, from Debian's packages, where this machine lets us install it. Without it they are
# skipped:  scripts/install_package.sh PROGRAM "what is skipped" PACKAGE...
set -euo pipefail
program=$1 skipped="$2 are skipped" packages=("${@:3}")
if command -v "$program" > /dev/null; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "$skipped: install ${packages[0]} (Debian's package), which needs root"
    exit 0
fi
quick=(-o DPkg::Lock::Timeout=300 -o Acquire::http::Timeout=30 -o Acquire::https::Timeout=30 -o Acquire::Retries=1)
apt-get "${quick[@]}" update -qq && DEBIAN_FRONTEND=noninteractive apt-get "${quick[@]}" install -qq -y --no-install-recommends "${packages[@]}" > /dev/null ||
    echo "$skipped: ${packages[0]} could not be installed"
