// The checksums that `layer_sums.py` defines, of a record's layers, in one call without Python's lock.
//
// Plain C++: what compiles it finds the vectors (a product of 32 bits by 32 and a sum of 64 are in all of
// them), and the C library takes the widest function that the CPU has when it loads this.

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__) && defined(__GLIBC__)
#define SAMOVAR_WIDEST __attribute__((target_clones("avx2", "default")))
#else
#define SAMOVAR_WIDEST
#endif

static_assert(std::endian::native == std::endian::little, "a word is little endian");

namespace {

constexpr long kWord = 8, kPieceWords = 512, kPiece = kPieceWords * kWord;
constexpr uint64_t kStep = 0x9e3779b97f4a7c15;

constexpr uint64_t mixed(uint64_t word) {
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9;
    word = (word ^ (word >> 27)) * 0x94d049bb133111eb;
    return word ^ (word >> 31);
}

constexpr auto kKeys = [] {
    std::array<uint64_t, 2 * kPieceWords> keys{};
    uint64_t at = 0;
    for (uint64_t& key : keys) key = mixed(at += kStep);
    return keys;
}();

struct Sums {
    uint64_t first, second;
};

uint64_t product(uint64_t word, uint64_t key) {
    uint32_t low = static_cast<uint32_t>(word) + static_cast<uint32_t>(key);
    uint32_t high = static_cast<uint32_t>(word >> 32) + static_cast<uint32_t>(key >> 32);
    return static_cast<uint64_t>(low) * high;
}

}  // namespace

// Not in the namespace: not all compilers choose between clones of what only this file sees.
SAMOVAR_WIDEST void samovar_piece_sums(const uint8_t* piece, long words, const uint64_t* keys, Sums* sums) {
    uint64_t first = 0, second = 0;
    for (long at = 0; at < words; ++at) {
        uint64_t word;
        std::memcpy(&word, piece + at * kWord, kWord);
        first += product(word, keys[at]);
        second += product(word, keys[at + kPieceWords]);
    }
    *sums = {first, second};
}

namespace {

uint64_t layer_sum(const uint8_t* layer, long bytes, uint64_t seed) {
    uint64_t sum = 0;
    for (long start = 0; start < bytes; start += kPiece) {
        const long size = std::min(kPiece, bytes - start), words = size / kWord, rest = size % kWord;
        Sums sums;
        samovar_piece_sums(layer + start, words, kKeys.data(), &sums);
        if (rest) {
            uint64_t word = 0;
            std::memcpy(&word, layer + start + words * kWord, rest);
            sums.first += product(word, kKeys[words]);
            sums.second += product(word, kKeys[words + kPieceWords]);
        }
        seed += kStep;
        sum += mixed(mixed(sums.first ^ seed) + sums.second);
    }
    return sum;
}

}  // namespace

// `payload`: blocks of `layers` runs of `layer_bytes`; `seeds`: of each block; `sums`: `[blocks, layers]`.
extern "C" __attribute__((visibility("default"))) void samovar_layer_sums(
    const uint8_t* payload, long blocks, long layers, long layer_bytes, const uint64_t* seeds, uint64_t* sums,
    long threads) {
    const long rows = blocks * layers;
    auto compute = [=](long from, long to) {
        for (long row = from; row < to; ++row) {
            const uint64_t place = static_cast<uint64_t>(row % layers) << 32 | layer_bytes;
            const uint64_t seed = mixed(seeds[row / layers] ^ mixed(place));
            sums[row] = layer_sum(payload + row * layer_bytes, layer_bytes, seed);
        }
    };
    std::vector<std::thread> crew;
    for (long part = 1; part < threads; ++part) {
        const long from = rows * part / threads, to = rows * (part + 1) / threads;
        try {
            crew.emplace_back(compute, from, to);
        } catch (const std::system_error&) {  // the machine has no thread left
            compute(from, to);
        }
    }
    compute(0, rows / std::max(threads, 1L));
    for (std::thread& one : crew) one.join();
}
