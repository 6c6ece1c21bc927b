// What all of a step's numbers are made of: vectors, panels of weights, tiles of sums, and a block of keys.
//
// The rule that makes a step exact by construction: every sum is one chain of fused multiply-adds over its
// inner index in ascending order, or 32 such chains whose sums are added in ascending order; with weights in
// pairs a chain takes both numbers of a pair, the second first, as the CPU's dot products of bf16 do. No chain
// depends on how many rows, tiles or threads there are, nor on how wide this machine's vectors are. What is no
// sum is computed for each number alone; the compiler may not fuse or reorder it (-ffp-contract=off).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// A test plants faults by this number, to see that the laws notice them.
#ifndef SAMOVAR_FAULT
#define SAMOVAR_FAULT 0
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

constexpr int PANEL = 32;  // outputs in a panel of weights; keys in a block of attention; chains of a norm
constexpr int HALF = PANEL / 2;

struct bf16 {
    uint16_t bits;
};

// Two neighbours of a row, for dot products in bf16: the first one is the lower half.
struct pair {
    uint32_t bits;
};

INLINE float from_bits(uint32_t bits) {
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

INLINE uint32_t bits_of(float number) {
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    return bits;
}

INLINE float widened(bf16 number) { return from_bits(uint32_t(number.bits) << 16); }
INLINE float widened(float number) { return number; }

INLINE void narrow(float number, float& stored) { stored = number; }
INLINE void narrow(float number, bf16& stored) {  // to nearest, ties to even; NaN stays NaN
    uint32_t bits = bits_of(number);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    stored.bits = uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

INLINE pair paired(bf16 first, bf16 second) { return {uint32_t(first.bits) | uint32_t(second.bits) << 16}; }
// -- dot products in bf16, in plain C++ ---------------------------------------------------------------------

INLINE float without_denormals(float number) {
    return bits_of(number) & 0x7f800000u ? number : from_bits(bits_of(number) & 0x80000000u);
}

// What VCVTNEPS2BF16 computes: numbers rounded to nearest, ties to even; denormal ones are zero, NaN stays NaN.
INLINE pair paired(float first, float second) {
    bf16 low, high;
    narrow(without_denormals(first), low), narrow(without_denormals(second), high);
    return paired(low, high);
}

// x * y + sum, rounded once; what is denormal after that is zero.
INLINE float fma_without_denormals(float x, float y, float sum) {
    float plain = __builtin_fmaf(x, y, sum);
    uint32_t size = bits_of(plain) & 0x7fffffffu;
    // The least normal number: was it denormal before it was rounded to fewer bits than a normal number has?
    if (size == 0x00800000u && std::fabs(__builtin_fmaf(x * 0x1p32f, y * 0x1p32f, sum * 0x1p64f)) < 0x1p-62f) size--;
    return size < 0x00800000u ? from_bits(bits_of(plain) & 0x80000000u) : plain;
}

// What VDPBF16PS computes (Intel's manual, volume 2): the product of the second numbers first, denormal numbers
// read and written as zeros, rounded to nearest after each addition.
INLINE float dot_of(pair x, pair y, float sum) {
    float x_first = without_denormals(from_bits(x.bits << 16)), y_first = without_denormals(from_bits(y.bits << 16));
    float x_second = without_denormals(from_bits(x.bits & 0xffff0000u));
    float y_second = without_denormals(from_bits(y.bits & 0xffff0000u));
    sum = fma_without_denormals(x_second, y_second, without_denormals(sum));
    return fma_without_denormals(x_first, y_first, sum);
}

// -- vectors ------------------------------------------------------------------------------------------------
// `load_pair`: W numbers of the first half of a panel's row from `unit * W` on, and as many of its second half.
// In bf16 one word holds a number of each half, so that a shift and a mask widen them.

#if defined(__AVX512F__)

using Vec = __m512;
constexpr int W = 16, SUMS = 24;
INLINE Vec zero() { return _mm512_setzero_ps(); }
INLINE Vec load(const float* from) { return _mm512_loadu_ps(from); }
INLINE void store(float* to, Vec value) { _mm512_storeu_ps(to, value); }
INLINE Vec spread(float value) { return _mm512_set1_ps(value); }
INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Vec multiply(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
INLINE Vec widen_codes(const int8_t* codes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes))));
}
INLINE void load_pair(const bf16* row, int unit, Vec& low, Vec& high) {
    __m512i words = _mm512_loadu_si512(row + 2 * W * unit);
    low = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    high = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(int(0xffff0000u))));
}

#elif defined(__AVX2__) && defined(__FMA__)

using Vec = __m256;
constexpr int W = 8, SUMS = 12;
INLINE Vec zero() { return _mm256_setzero_ps(); }
INLINE Vec load(const float* from) { return _mm256_loadu_ps(from); }
INLINE void store(float* to, Vec value) { _mm256_storeu_ps(to, value); }
INLINE Vec spread(float value) { return _mm256_set1_ps(value); }
INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Vec multiply(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
INLINE Vec widen_codes(const int8_t* codes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))));
}
INLINE void load_pair(const bf16* row, int unit, Vec& low, Vec& high) {
    __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + 2 * W * unit));
    low = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
    high = _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(int(0xffff0000u))));
}

#elif defined(__ARM_NEON) && defined(__aarch64__)

using Vec = float32x4_t;
constexpr int W = 4, SUMS = 24;
INLINE Vec zero() { return vdupq_n_f32(0); }
INLINE Vec load(const float* from) { return vld1q_f32(from); }
INLINE void store(float* to, Vec value) { vst1q_f32(to, value); }
INLINE Vec spread(float value) { return vdupq_n_f32(value); }
INLINE Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
INLINE Vec multiply(Vec a, Vec b) { return vmulq_f32(a, b); }
INLINE Vec widen_codes(const int8_t* codes) {
    const float numbers[W] = {float(codes[0]), float(codes[1]), float(codes[2]), float(codes[3])};
    return load(numbers);
}
INLINE void load_pair(const bf16* row, int unit, Vec& low, Vec& high) {
    uint32x4_t words = vreinterpretq_u32_u16(vld1q_u16(&row[2 * W * unit].bits));
    low = vreinterpretq_f32_u32(vshlq_n_u32(words, 16));
    high = vreinterpretq_f32_u32(vandq_u32(words, vdupq_n_u32(0xffff0000u)));
}

#else  // any machine: slow where it has no fused multiply-add, and the same numbers

using Vec = float;
constexpr int W = 1, SUMS = 12;
INLINE Vec zero() { return 0; }
INLINE Vec load(const float* from) { return *from; }
INLINE void store(float* to, Vec value) { *to = value; }
INLINE Vec spread(float value) { return value; }
INLINE Vec fma(Vec a, Vec b, Vec c) { return __builtin_fmaf(a, b, c); }
INLINE Vec multiply(Vec a, Vec b) { return a * b; }
INLINE Vec widen_codes(const int8_t* codes) { return float(*codes); }
INLINE void load_pair(const bf16* row, int unit, Vec& low, Vec& high) {
    low = widened(row[2 * unit]);
    high = widened(row[2 * unit + 1]);
}

#endif

INLINE void load_pair(const float* row, int unit, Vec& low, Vec& high) {
    low = load(row + W * unit);
    high = load(row + HALF + W * unit);
}

INLINE void load_pair(const pair* row, int unit, Vec& low, Vec& high) {
    load_pair(reinterpret_cast<const float*>(row), unit, low, high);
}

INLINE void load_pair(const int8_t* row, int unit, Vec& low, Vec& high) {
    low = widen_codes(row + W * unit);
    high = widen_codes(row + HALF + W * unit);
}

INLINE Vec spread(pair value) { return spread(from_bits(value.bits)); }

// sum + x . y, of pairs
INLINE Vec dot(Vec x, Vec y, Vec sum) {
#if defined(__AVX512BF16__) && SAMOVAR_FAULT != 3
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y);
#else
    float xs[W], ys[W], sums[W];
    store(xs, x), store(ys, y), store(sums, sum);
    for (int i = 0; i < W; i++) {
        pair one{bits_of(xs[i])}, other{bits_of(ys[i])};
#if SAMOVAR_FAULT == 3
        one.bits = one.bits << 16 | one.bits >> 16, other.bits = other.bits << 16 | other.bits >> 16;
#endif
        sums[i] = dot_of(one, other, sums[i]);
    }
    return load(sums);
#endif
}

// Rounds `count` numbers to pairs; behind an odd number of them is a zero.
INLINE void pair_up(const float* from, long count, pair* to) {
    long i = 0;
#if defined(__AVX512BF16__)
    for (; i + W <= count; i += W)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i / 2), (__m256i)_mm512_cvtneps_pbh(load(from + i)));
#endif
    for (; i + 2 <= count; i += 2) to[i / 2] = paired(from[i], from[i + 1]);
    if (i < count) to[i / 2] = paired(from[i], 0.0f);
}

// Returns whether this CPU's dot products are those of `dot_of`, and its rounding to pairs that of `paired`, in
// `trials` draws of many kinds: then bits are the same on every such CPU. A NaN is as good as another.
static inline bool dots_are_right(long trials) {
    uint64_t state = 0x9e3779b97f4a7c15u;
    auto drawn = [&] {  // Marsaglia's xorshift64
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        return uint32_t(state >> 32);
    };
    // Of any exponent, or of one of 8: so near to each other that all roundings matter.
    auto bf16_near = [&](uint32_t from) {
        uint32_t bits = drawn();
        return uint16_t(from ? (bits & 0x807fu) | ((from + bits / 0x10000u % 8) << 7) : bits);
    };
    for (long trial = 0; trial < trials; trial++) {
        float xs[W], ys[W], sums[W], found[W];
        // Products near 1; near the least normal number; of odd bits: infinities, NaN, denormal numbers.
        uint32_t near = trial % 3 == 0 ? 124 : trial % 3 == 1 ? 60 : 0;
        for (int i = 0; i < W; i++) {
            auto any = [&] { return from_bits(bf16_near(near) | uint32_t(bf16_near(near)) << 16); };
            xs[i] = any(), ys[i] = any();
            uint32_t sum = drawn(), exponent = near == 124 ? 122 + drawn() % 12 : drawn() % 8;
            sums[i] = from_bits(near ? (sum & 0x807fffffu) | exponent << 23 : sum);
            if (near == 60 && drawn() % 2) sums[i] = from_bits(0x00800000u + drawn() % 4);
        }
        store(found, dot(load(xs), load(ys), load(sums)));
        for (int i = 0; i < W; i++) {
            float truth = dot_of({bits_of(xs[i])}, {bits_of(ys[i])}, sums[i]);
            if (bits_of(truth) != bits_of(found[i]) && (truth == truth || found[i] == found[i])) return false;
        }
        pair rounded[(W + 1) / 2];
        pair_up(sums, W, rounded);
        for (int i = 0; i < W; i++) {
            uint32_t truth = paired(sums[i], 0.0f).bits << 16, other = rounded[i / 2].bits << (i % 2 ? 0 : 16);
            bool are_nan = from_bits(truth) != from_bits(truth) && sums[i] != sums[i];
            if (truth != (other & 0xffff0000u) && !are_nan) return false;
        }
    }
    return true;
}

// What a sum is of: the rows' numbers that one entry of a panel is multiplied with, and the product added.
template <class Weight>
struct Term {
    using type = float;
    static constexpr int NUMBERS = 1;
    INLINE Vec add(Vec x, Vec weight, Vec sum) { return fma(x, weight, sum); }
};
template <>
struct Term<pair> {
    using type = pair;
    static constexpr int NUMBERS = 2;
    INLINE Vec add(Vec x, Vec weight, Vec sum) { return dot(x, weight, sum); }
};
template <class Weight>
using TermOf = typename Term<Weight>::type;

// Number `which` of an entry of a panel.
INLINE float number_of(bf16 entry, long) { return widened(entry); }
INLINE float number_of(float entry, long) { return entry; }
INLINE float number_of(pair entry, long which) {
    return from_bits(which ? entry.bits & 0xffff0000u : entry.bits << 16);
}

// How many terms a row of so many numbers has.
template <class Weight>
constexpr long terms_of(long numbers) {
    return (numbers + Term<Weight>::NUMBERS - 1) / Term<Weight>::NUMBERS;
}

constexpr int UNITS = HALF / W;
constexpr int ROWS = SUMS / 2;  // of a tile

// Where column `column` of a panel's row lies.
template <class Weight>
INLINE int place_in_row(int column) {
    return column;
}
template <>
inline int place_in_row<bf16>(int column) {
    return column < HALF ? 2 * column : 2 * (column - HALF) + 1;
}

// -- tiles --------------------------------------------------------------------------------------------------

// Begun with panels from memory, or that are in the cache; or continued, with what is in the cache.
enum class Sums { of_memory, of_cache, continued };

// How many bytes ahead panels are fetched, 0: not at all, as a core fetches one run ahead by itself, if it is not
// kept from that by many rows' products. Several runs it does not.
template <class Weight, int M, int P, Sums SUMS_ARE>
constexpr long fetched_ahead() {
    if (SUMS_ARE != Sums::of_memory) return 0;
    return P > 1 ? 5 << 10 : M > 2 ? 8 << 10 : 0;
}

// One tile: sums[r][c] (+)= the chain over k of rows[k][r] * panel[k][c], for M rows and P panels.
// `rows`: term k of row r lies at `k * k_step + r * ROW_STEP`.
template <class Weight, int M, int P, int ROW_STEP, Sums SUMS_ARE>
INLINE void tile_of(const TermOf<Weight>* rows, long k_step, const Weight* panels, long panel_step, long row_step,
                    long count, float* sums, long sums_step) {
    constexpr int TOGETHER = 2 * M * P * UNITS <= SUMS ? UNITS : 1;  // units of a row at a time
    for (int first = 0; first < UNITS; first += TOGETHER) {
        Vec low[M][P][TOGETHER], high[M][P][TOGETHER];
        UNROLL for (int r = 0; r < M; r++)
            UNROLL for (int p = 0; p < P; p++)
                UNROLL for (int u = 0; u < TOGETHER; u++) {
                    float* at = sums + r * sums_step + p * PANEL + (first + u) * W;
                    low[r][p][u] = SUMS_ARE == Sums::continued ? load(at) : zero();
                    high[r][p][u] = SUMS_ARE == Sums::continued ? load(at + HALF) : zero();
                }
        for (long step = 0; step < count; step++) {
            long k = step;
#if SAMOVAR_FAULT == 1
            if (M == 1 && count > 8 && step >= count - 2) k = 2 * count - 3 - step;  // the last two change places
#endif
            const Weight* row = panels + k * row_step;
            Vec a[P][TOGETHER], b[P][TOGETHER];
            UNROLL for (int p = 0; p < P; p++) {
                constexpr long AHEAD = fetched_ahead<Weight, M, P, SUMS_ARE>(), ROW_BYTES = PANEL * sizeof(Weight);
                for (long line = 0; AHEAD && line < ROW_BYTES; line += 64)
                    __builtin_prefetch(reinterpret_cast<const char*>(row + p * panel_step) + AHEAD + line);
                UNROLL for (int u = 0; u < TOGETHER; u++)
                    load_pair(row + p * panel_step, first + u, a[p][u], b[p][u]);
            }
            UNROLL for (int r = 0; r < M; r++) {
                Vec x = spread(rows[k * k_step + r * ROW_STEP]);
                UNROLL for (int p = 0; p < P; p++)
                    UNROLL for (int u = 0; u < TOGETHER; u++) {
                        low[r][p][u] = Term<Weight>::add(x, a[p][u], low[r][p][u]);
                        high[r][p][u] = Term<Weight>::add(x, b[p][u], high[r][p][u]);
                    }
            }
        }
        UNROLL for (int r = 0; r < M; r++)
            UNROLL for (int p = 0; p < P; p++)
                UNROLL for (int u = 0; u < TOGETHER; u++) {
                    float* at = sums + r * sums_step + p * PANEL + (first + u) * W;
                    store(at, low[r][p][u]);
                    store(at + HALF, high[r][p][u]);
                }
    }
}

// Up to so many panels at a time: enough chains to hide the latency of one, no more sums than registers. Where a
// panel's row is two cache lines, its own chains do; then one panel at a time, which is one run of memory.
template <class Weight>
constexpr int panels_at_once(int rows, Sums are) {
    constexpr long ROW_BYTES = PANEL * long(sizeof(Weight));
    if (are != Sums::continued && (ROW_BYTES >= 128 || (ROW_BYTES == 64 && rows == 1))) return 1;
    return rows <= SUMS / 8 ? 4 : rows <= SUMS / 4 ? 2 : 1;
}

template <class Weight, int M, int ROW_STEP, Sums SUMS_ARE>
static void tile_with(const TermOf<Weight>* rows, long k_step, const Weight* panels, int panel_count, long panel_step,
                      long row_step, long count, float* sums, long sums_step) {
    constexpr int MOST = panels_at_once<Weight>(M, SUMS_ARE);
    constexpr int MANY = MOST > 4 / UNITS ? (4 / UNITS ? 4 / UNITS : 1) : MOST;
    int done = 0;
    for (; done + MANY <= panel_count; done += MANY)
        tile_of<Weight, M, MANY, ROW_STEP, SUMS_ARE>(rows, k_step, panels + done * panel_step, panel_step,
                                                     row_step, count, sums + done * PANEL, sums_step);
    if constexpr (MANY == 4 && SUMS_ARE == Sums::continued)
        for (; done + 2 <= panel_count; done += 2)
            tile_of<Weight, M, 2, ROW_STEP, SUMS_ARE>(rows, k_step, panels + done * panel_step, panel_step, row_step,
                                                      count, sums + done * PANEL, sums_step);
    for (; MANY > 1 && done < panel_count; done++)
        tile_of<Weight, M, 1, ROW_STEP, SUMS_ARE>(rows, k_step, panels + done * panel_step, panel_step,
                                                  row_step, count, sums + done * PANEL, sums_step);
}

template <class Weight, int ROW_STEP, Sums SUMS_ARE, int M = ROWS>
INLINE void tile(int rows_here, const TermOf<Weight>* rows, long k_step, const Weight* panels, int panel_count,
                 long panel_step, long row_step, long count, float* sums, long sums_step) {
    if constexpr (M > 0) {
        if (rows_here == M)
            tile_with<Weight, M, ROW_STEP, SUMS_ARE>(rows, k_step, panels, panel_count, panel_step, row_step,
                                                     count, sums, sums_step);
        else
            tile<Weight, ROW_STEP, SUMS_ARE, M - 1>(rows_here, rows, k_step, panels, panel_count, panel_step,
                                                    row_step, count, sums, sums_step);
    }
}

// -- sums of one row ----------------------------------------------------------------------------------------

// The sum of squares of `count` numbers: 32 chains, added in order.
INLINE float sum_of_squares(const float* numbers, long count) {
    float lanes[PANEL] = {};
    long whole = count / PANEL * PANEL;
    Vec sums[PANEL / W];
    UNROLL for (int v = 0; v < PANEL / W; v++) sums[v] = zero();
    for (long i = 0; i < whole; i += PANEL)
        UNROLL for (int v = 0; v < PANEL / W; v++) {
            Vec x = load(numbers + i + v * W);
            sums[v] = fma(x, x, sums[v]);
        }
    UNROLL for (int v = 0; v < PANEL / W; v++) store(lanes + v * W, sums[v]);
    for (long i = whole; i < count; i++)
        lanes[i - whole] = __builtin_fmaf(numbers[i], numbers[i], lanes[i - whole]);
    float sum = lanes[0];
    for (int lane = 1; lane < PANEL; lane++) sum += lanes[lane];
    return sum;
}

// -- a block of keys ----------------------------------------------------------------------------------------

// The term of a vector that begins with its number `at`.
template <class Stored>
INLINE void take_term(const Stored* from, long at, float& to) {
    to = widened(from[at]);
}
INLINE void take_term(const bf16* from, long at, pair& to) { to = paired(from[at], from[at + 1]); }

#if defined(__AVX512BW__)
// Returns 16 pairs of two vectors' numbers, from number `first` on.
INLINE __m512i interleaved(__m512i low, __m512i high, int first) {
    __m512i places = _mm512_set1_epi32(0x00200000);  // in both vectors, one behind the other
    places = _mm512_add_epi32(places, _mm512_mullo_epi32(
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(0x10001)));
    return _mm512_permutex2var_epi16(low, _mm512_add_epi32(places, _mm512_set1_epi32(first * 0x10001)), high);
}
#endif

// Vectors of which something is made, and those that are needed later: to be brought to the cache meanwhile, one
// line for each that is read, as the CPU knows nothing of what lies anywhere.
template <class Stored>
struct Vectors {
    const Stored *here[PANEL], *later[PANEL];
    static void fetch(const Stored* line) { __builtin_prefetch(line); }
};

// Writes `count` numbers of PANEL vectors, one vector below the other, `step` apart; or pairs of two vectors'.
template <class Stored>
static void lay_out(const Vectors<Stored>& of, long count, float* to, long step) {
    constexpr long LINE = 64 / sizeof(Stored);
    for (int j = 0; j < PANEL; j++) {
        for (long d = 0; d < count; d += LINE) of.fetch(of.later[j] + d);
        for (long d = 0; d < count; d++) to[j * step + d] = widened(of.here[j][d]);
    }
}
static inline void lay_out(const Vectors<bf16>& of, long count, pair* to, long step) {
    for (int j = 0; j < PANEL; j += 2) {
        const bf16 *first = of.here[j], *second = of.here[j + 1];
        pair* pairs = to + j / 2 * step;
        long d = 0;
#if defined(__AVX512BW__)
        for (; d + 32 <= count; d += 32) {
            of.fetch(of.later[j] + d), of.fetch(of.later[j + 1] + d);
            __m512i low = _mm512_loadu_si512(first + d), high = _mm512_loadu_si512(second + d);
            _mm512_storeu_si512(pairs + d, interleaved(low, high, 0));
            _mm512_storeu_si512(pairs + d + 16, interleaved(low, high, 16));
        }
#endif
        for (; d < count; d++) pairs[d] = paired(first[d], second[d]);
    }
}

#if defined(__AVX512F__)
// Transposes 16 rows of 16 words: word j of row i becomes word i of row j.
INLINE void transpose_words(__m512i (&rows)[16]) {
    __m512i t[16];
    UNROLL for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        rows[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        rows[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        rows[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        rows[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0xdd);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        rows[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        rows[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
        rows[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
        rows[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
    }
}

#if defined(__AVX512BF16__)
// Rounds rows of numbers to pairs, transposed: pair t of row i at `to[t * step + i]`. Returns how many numbers of
// each row it did.
static inline long put_pairs(const float* const* rows, int row_count, long count, pair* to, long step) {
    static_assert(ROWS <= 16);
    auto written = __mmask16((1u << row_count) - 1);
    long done = 0;
    for (; done + 32 <= count; done += 32) {
        __m512i words[16];
        UNROLL for (int i = 0; i < 16; i++) {
            const float* row = rows[i < row_count ? i : 0] + done;
            words[i] = (__m512i)_mm512_cvtne2ps_pbh(load(row + 16), load(row));
        }
        transpose_words(words);
        UNROLL for (int i = 0; i < 16; i++) _mm512_mask_storeu_epi32(to + (done / 2 + i) * step, written, words[i]);
    }
    return done;
}
#endif

// Writes numbers [begin, begin + 32) of 16 vectors transposed: term t of vector j at `to[t * PANEL + j]`.
INLINE void transpose_part(const Vectors<bf16>& of, int first, long begin, pair* to) {
    __m512i rows[16];
    UNROLL for (int i = 0; i < 16; i++) {
        rows[i] = _mm512_loadu_si512(of.here[first + i] + begin);
        of.fetch(of.later[first + i] + begin);
    }
    transpose_words(rows);
    UNROLL for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + (begin / 2 + i) * PANEL, rows[i]);
}
INLINE void transpose_part(const Vectors<bf16>& of, int first, long begin, float* to) {
    __m512i rows[16];
    UNROLL for (int i = 0; i < 16; i++) {
        rows[i] = _mm512_loadu_si512(of.here[first + i] + begin);
        of.fetch(of.later[first + i] + begin);
    }
    transpose_words(rows);
    UNROLL for (int i = 0; i < 16; i++) {
        float* at = to + (begin + 2 * i) * PANEL;
        store(at, _mm512_castsi512_ps(_mm512_slli_epi32(rows[i], 16)));
        store(at + PANEL,
              _mm512_castsi512_ps(_mm512_and_si512(rows[i], _mm512_set1_epi32(int(0xffff0000u)))));
    }
}
INLINE void transpose_part(const Vectors<float>& of, int first, long begin, float* to) {
    for (long half = begin; half < begin + 32; half += 16) {
        __m512i rows[16];
        UNROLL for (int i = 0; i < 16; i++) {
            rows[i] = _mm512_loadu_si512(of.here[first + i] + half);
            of.fetch(of.later[first + i] + half);
        }
        transpose_words(rows);
        UNROLL for (int i = 0; i < 16; i++) store(to + (half + i) * PANEL, _mm512_castsi512_ps(rows[i]));
    }
}
#else
template <class Stored, class Entry>
INLINE void transpose_part(const Vectors<Stored>& of, int first, long begin, Entry* to) {
    constexpr int NUMBERS = Term<Entry>::NUMBERS;
    for (int j = 0; j < 16; j++) {
        of.fetch(of.later[first + j] + begin);
        for (long d = begin; d < begin + 32; d += NUMBERS) take_term(of.here[first + j], d, to[d / NUMBERS * PANEL + j]);
    }
}
#endif

#if !defined(__AVX512BF16__)
static inline long put_pairs(const float* const*, int, long, pair*, long) { return 0; }
#endif

// Writes `head_dim` numbers of PANEL vectors transposed: term t of vector j at `to[t * PANEL + j]`.
template <class Stored, class Entry>
static void transpose(const Vectors<Stored>& of, long head_dim, Entry* to) {
    constexpr int NUMBERS = Term<Entry>::NUMBERS;
    long whole = head_dim / 32 * 32;
    for (int first = 0; first < PANEL; first += 16)
        for (long begin = 0; begin < whole; begin += 32) transpose_part(of, first, begin, to + first);
    for (int j = 0; j < PANEL; j++)
        for (long d = whole; d < head_dim; d += NUMBERS) take_term(of.here[j], d, to[d / NUMBERS * PANEL + j]);
}

// The largest of PANEL numbers.
INLINE float largest(const float* numbers) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(_mm512_max_ps(load(numbers), load(numbers + W)));
#else
    float lanes[8];
    for (int i = 0; i < 8; i++) lanes[i] = numbers[i];
    for (int j = 8; j < PANEL; j += 8)
        for (int i = 0; i < 8; i++) lanes[i] = numbers[j + i] > lanes[i] ? numbers[j + i] : lanes[i];
    float top = lanes[0];
    for (int i = 1; i < 8; i++) top = lanes[i] > top ? lanes[i] : top;
    return top;
#endif
}
