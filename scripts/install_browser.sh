#!/usr/bin/env bash
# The browser that tests of `mt-grpo view` drive, where this machine lets us install it. Without it they are skipped.
set -euo pipefail
if [ -x /usr/bin/chromium-headless-shell ]; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "tests of the page are skipped: install chromium-headless-shell (Debian's package), which needs root"
    exit 0
fi
quick=(-o Acquire::http::Timeout=30 -o Acquire::https::Timeout=30 -o Acquire::Retries=1)
apt-get "${quick[@]}" update -qq && DEBIAN_FRONTEND=noninteractive apt-get "${quick[@]}" install -qq -y --no-install-recommends chromium-headless-shell fonts-dejavu-core > /dev/null ||
    echo "tests of the page are skipped: chromium-headless-shell could not be installed"
