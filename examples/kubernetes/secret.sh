#!/usr/bin/env bash
# Makes the Secret with a new key for the agents of mesh trainers. The key is in no argument and in no log.
set -euo pipefail
umask 077
file=$(mktemp -d)/key
trap 'rm -rf "$(dirname "$file")"' EXIT
python3 -c 'import sys; from monarch_nb.transport import Keys; Keys.load_or_create(sys.argv[1])' "$file"
kubectl create secret generic trainers-monarch-key --from-file=key="$file" "$@"
