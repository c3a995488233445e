#!/usr/bin/env bash
# Makes FOLDER a Debian 13 with Python 3.13, podman and Harbor, in which tests run real containers on a machine that has
# neither: scripts/containers.sh FOLDER WHEEL... Needs root and a Debian, and takes about fifteen minutes and 7 GB.
#     FOLDER/in COMMAND...    runs a command inside; the machine's files are under /host
#     FOLDER/engine           podman's service, which Harbor's compose talks to
#     FOLDER/engine docker    Docker's daemon, with podman's images
set -euo pipefail
folder=$(realpath -m "$1") root=$folder/root
shift
if [ ! -x "$folder/in" ]; then
    mkdir -p "$folder"
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends debootstrap bubblewrap
    mirror=$(grep -rhoE 'https?://[^ ]+/debian/?( |$)' /etc/apt/sources.list /etc/apt/sources.list.d | head -n 1 || true)
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates,iproute2 trixie "$root" $mirror
    # no registry of images is needed: the image of the test's tasks is this Debian
    tar -C "$root" -cf "$folder/base.tar" --exclude=./proc --exclude=./sys --exclude=./dev --exclude=./var/cache .
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
    cp /etc/resolv.conf /etc/hosts "$root/etc/"
    cp /etc/apt/apt.conf.d/* "$root/etc/apt/apt.conf.d/" 2> /dev/null || true
    [ ! -f /etc/pip.conf ] || cp /etc/pip.conf "$root/etc/"
    mkdir -p "$root/host" "$root/run/podman" "$root/store" "$root/etc/containers"
    printf '%s\n' '[containers]' 'default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]' '[engine]' \
        'runtime = "runc"' 'cgroup_manager = "cgroupfs"' 'events_logger = "file"' > "$root/etc/containers/containers.conf"
    printf '%s\n' '[storage]' 'driver = "overlay"' 'runroot = "/run/containers/storage"' 'graphroot = "/store"' \
        > "$root/etc/containers/storage.conf"
    mkdir -p "$root/etc/docker"
    printf '%s\n' '{"data-root": "/docker", "exec-opts": ["native.cgroupdriver=cgroupfs"], "default-ulimits": {' \
        '"nofile": {"Name": "nofile", "Hard": 1024, "Soft": 1024}, "nproc": {"Name": "nproc", "Hard": 4096, "Soft": 4096}}}' \
        > "$root/etc/docker/daemon.json"
    wheels=""
    if [ -d /opt/wheels ]; then mkdir -p "$root/opt/wheels"; wheels="--bind /opt/wheels /opt/wheels"; fi
    cat > "$folder/in" <<IN
#!/usr/bin/env bash
# the root has to be a mount point for podman, so a chroot would not do
exec bwrap --bind $root / --dev-bind /dev /dev --bind /proc /proc --bind /sys /sys --bind / /host $wheels --cap-add ALL \\
    --setenv HOME /root --setenv PATH /venv/bin:/usr/sbin:/usr/bin:/sbin:/bin --setenv PIP_CONFIG_FILE /etc/pip.conf \\
    --setenv PIP_CERT /etc/ssl/certs/ca-certificates.crt --setenv SSL_CERT_FILE /etc/ssl/certs/ca-certificates.crt \\
    --setenv PODMAN_IGNORE_CGROUPSV1_WARNING 1 --setenv LITELLM_LOCAL_MODEL_COST_MAP True "\$@"
IN
    cat > "$folder/engine" <<ENGINE
#!/usr/bin/env bash
[ "\${1:-podman}" = docker ] || exec $folder/in podman system service --time=0 unix:///run/podman/podman.sock
exec $folder/in bash -c 'dockerd > /var/log/dockerd.log 2>&1 & until docker info; do sleep 1; done > /dev/null 2>&1
    for image in localhost/base:1 localhost/agents:1; do
        docker image inspect \$image > /dev/null 2>&1 || podman save \$image | docker load
    done
    wait'
ENGINE
    chmod +x "$folder/in" "$folder/engine"
    "$folder/in" apt-get update -qq
    "$folder/in" apt-get install -y -qq --no-install-recommends \
        podman runc uidmap netavark aardvark-dns nftables iptables docker-compose docker-cli docker.io git bubblewrap
    "$folder/in" python3 -m venv /venv
    "$folder/in" podman import "/host$folder/base.tar" localhost/base:1
    # an image with agents, so that no conversation installs one
    mkdir -p "$folder/agents"
    cat > "$folder/agents/Dockerfile" <<'IMAGE'
FROM localhost/base:1
ENV NODE_EXTRA_CA_CERTS=/etc/ssl/certs/ca-certificates.crt
RUN mkdir -p /var/cache/apt/archives/partial && apt-get update -qq && apt-get install -y -qq --no-install-recommends \
    tmux python3-pip git curl nodejs npm ripgrep > /dev/null
RUN pip install --quiet --break-system-packages --root-user-action ignore mini-swe-agent "litellm[mcp]" orjson fastapi
RUN npm install -g @openai/codex @qwen-code/qwen-code @anthropic-ai/claude-code
IMAGE
    given=""
    for file in /etc/pip.conf /root/.npmrc /etc/ssl/certs/ca-certificates.crt; do
        [ ! -f "$file" ] || given="$given -v /host$file:$file:ro"
    done
    [ -z "$wheels" ] || given="$given -v /opt/wheels:/opt/wheels:ro"
    "$folder/in" podman build --quiet --network=host $given -t localhost/agents:1 "/host$folder/agents"
fi
"$folder/in" pip install --quiet torch==2.13.0
"$folder/in" pip install --quiet "$@"
