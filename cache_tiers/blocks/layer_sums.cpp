// The checksums that `record.py` defines, of a record's layers, in one call without Python's lock.
//
// Products with AVX2 where the CPU has it: compilers multiply 64 bits by 64 where 32 by 32 would do. Wider
// vectors are no quicker, as a core reads memory no faster than that.

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__) && !defined(SAMOVAR_PLAIN)
#define SAMOVAR_AVX2
#include <immintrin.h>
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

Sums plain_sums(const uint8_t* piece, long from, long words) {
    Sums sums{};
    for (long at = from; at < words; ++at) {
        uint64_t word;
        std::memcpy(&word, piece + at * kWord, kWord);
        sums.first += product(word, kKeys[at]);
        sums.second += product(word, kKeys[at + kPieceWords]);
    }
    return sums;
}

#ifdef SAMOVAR_AVX2
__attribute__((target("avx2"))) __m256i load(const void* from) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}

__attribute__((target("avx2"))) __m256i products(__m256i words, const uint64_t* keys) {
    const __m256i keyed = _mm256_add_epi32(words, load(keys));
    return _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
}

__attribute__((target("avx2"))) uint64_t total(__m256i sums) {
    uint64_t each[4];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(each), sums);
    return each[0] + each[1] + each[2] + each[3];
}

__attribute__((target("avx2"))) Sums avx2_sums(const uint8_t* piece, long words) {
    __m256i first = _mm256_setzero_si256(), second = first;
    long at = 0;
    for (; at + 4 <= words; at += 4) {
        const __m256i four = load(piece + at * kWord);
        first = _mm256_add_epi64(first, products(four, &kKeys[at]));
        second = _mm256_add_epi64(second, products(four, &kKeys[at + kPieceWords]));
    }
    const Sums rest = plain_sums(piece, at, words);
    return {total(first) + rest.first, total(second) + rest.second};
}
#endif

Sums piece_sums(const uint8_t* piece, long words) {
#ifdef SAMOVAR_AVX2
    static const bool has_avx2 = __builtin_cpu_supports("avx2");
    if (has_avx2) return avx2_sums(piece, words);
#endif
    return plain_sums(piece, 0, words);
}

uint64_t layer_sum(const uint8_t* layer, long bytes, uint64_t seed) {
    uint64_t sum = 0;
    for (long start = 0; start < bytes; start += kPiece) {
        const long size = std::min(kPiece, bytes - start), words = size / kWord, rest = size % kWord;
        Sums sums = piece_sums(layer + start, words);
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
