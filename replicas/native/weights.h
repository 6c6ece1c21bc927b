// What a step computes with: its description in C, memory, rows in tiles, weights in panels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

#include <sys/mman.h>

#include "crew.h"
#include "kernels.h"

extern "C" {

// Weights are `[outputs, inputs]`, contiguous, of the model's dtype; null where a layer has none.
struct samovar_layer {
    const void *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias, *mlp_norm, *gate_up, *down;
    int64_t uses_rope, window;  // window: 0 = none
};

struct samovar_model {
    int64_t layer_count, hidden, inner, vocab, q_heads, kv_heads, head_dim;
    float norm_eps, attention_scale, rope_scale, embedding_multiplier, residual_multiplier, logits_divisor;
    const samovar_layer* layers;
    const void *embedding, *final_norm, *head;  // all is copied, see `samovar_reads_embedding`
    const float* inverse_frequencies;           // [head_dim / 2]
};

// Steps are counted in numbers, not bytes.
struct samovar_step {
    int64_t rows, segments, table_words, wanted_rows;
    const int32_t *token_ids, *positions, *slots;  // [rows]
    const int32_t *spans, *tables;                 // [segments, 4]: first row, rows, context, first table word
    const int32_t* wanted;                         // [wanted_rows]: rows of segments, ascending; -1 rows: all
    void* pool;
    int64_t layers, pages, block_tokens, heads_per_group;  // the first layers of the model: all but in a probe
    int64_t page_step, group_step, layer_step, value_step, slot_step, head_step;
    float* hidden;  // [rows, hidden], written; NaN where a row is not wanted

    bool is_part() const { return wanted_rows >= 0 && wanted_rows < rows; }
};
}

constexpr int CHUNK = 4;                 // panels of an item
constexpr long BLOCK_BYTES = 384 << 10;  // of rows that stay in the L2 cache
constexpr long HUGE_PAGE = 2 << 20;

constexpr long rounded_up(long number, long multiple) { return (number + multiple - 1) / multiple * multiple; }

// Memory that is never initialised, on whole huge pages where there is enough of it.
class Memory {
  public:
    Memory() = default;
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    Memory(Memory&& other) noexcept { std::swap(data_, other.data_), std::swap(bytes_, other.bytes_); }
    Memory& operator=(Memory&& other) noexcept {
        std::swap(data_, other.data_), std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~Memory() { std::free(data_); }

    void hold(long bytes) {
        if (bytes <= bytes_) return;
        std::free(data_);
        bytes_ = 0;
        long aligned = bytes >= HUGE_PAGE ? HUGE_PAGE : 64;
        data_ = std::aligned_alloc(aligned, rounded_up(bytes, aligned));
        if (data_ == nullptr) throw std::bad_alloc();
        bytes_ = rounded_up(bytes, aligned);
        if (aligned == HUGE_PAGE) madvise(data_, bytes_, MADV_HUGEPAGE);
    }
    float* floats(long count) {
        hold(count * long(sizeof(float)));
        return static_cast<float*>(data_);
    }
    template <class Entry>
    Entry* entries(long count) {
        hold(count * long(sizeof(Entry)));
        return static_cast<Entry*>(data_);
    }
    template <class Entry>
    Entry* as() const {
        return static_cast<Entry*>(data_);
    }

  private:
    void* data_ = nullptr;
    long bytes_ = 0;
};

// Rows in tiles of up to ROWS, as equal as can be. Term t of a tile's row lies at `begin * terms + t * rows
// + row`: what a tile reads is one run.
struct Tiles {
    long rows, count;
    explicit Tiles(long rows_) : rows(rows_), count((rows_ + ROWS - 1) / ROWS) {}
    long begin(long tile) const { return rows * tile / count; }
    int size(long tile) const { return int(begin(tile + 1) - begin(tile)); }
    long of(long row) const {
        long tile = row * count / rows;
        while (begin(tile + 1) <= row) tile++;
        while (begin(tile) > row) tile--;
        return tile;
    }
    // Packs `count` numbers of row `i` of a tile, the first of which is number `first` of so many terms' ones.
    void put(const float* from, long tile, int i, long first, long count, long terms, float* packed) const {
        float* to = packed + begin(tile) * terms + i;
        for (long k = 0, here = size(tile); k < count; k++) to[(first + k) * here] = from[k];
    }
    // `first` is even.
    void put(const float* from, long tile, int i, long first, long count, long terms, pair* packed) const {
        constexpr long AT_ONCE = 4 * PANEL;
        pair some[AT_ONCE / 2];
        pair* to = packed + begin(tile) * terms + i;
        for (long k = 0, here = size(tile); k < count; k += AT_ONCE) {
            long numbers = std::min(AT_ONCE, count - k);
            pair_up(from + k, numbers, some);
            for (long t = 0; t < (numbers + 1) / 2; t++) to[((first + k) / 2 + t) * here] = some[t];
        }
    }
    // The same of `together` rows from `i` on: what lies side by side is written together.
    template <class Entry>
    void put_all(const float* const* from, int together, long tile, int i, long first, long count, long terms,
                 Entry* packed) const {
        long done = 0;
        if constexpr (Term<Entry>::NUMBERS == 2)
            if (together >= WORTH_IT) {
                pair* to = packed + begin(tile) * terms + first / 2 * size(tile) + i;
                done = put_pairs(from, together, count, to, size(tile));
            }
        if (done == count) return;
        for (int j = 0; j < together; j++)
            put(from[j] + done, tile, i + j, first + done, count - done, terms, packed);
    }

    static constexpr int WORTH_IT = 3;  // of 16 that are transposed
};

// Rows of numbers, `step` apart; or packed in tiles, with `step` terms each.
template <class Entry>
struct Rows {
    Entry* entries;
    long step;
};

// Rounds a row of weights to what is kept of it, and returns the factor of its sums.
template <class Number>
INLINE float round_row(const Number* row, long count, long step, Number* to) {
    for (long k = 0; k < count; k++) to[k * step] = row[k];
    return 1.0f;
}
INLINE float round_row(const bf16* row, long count, long step, pair* to) {
    for (long k = 0; k < count; k += 2) to[k / 2 * step] = paired(row[k], k + 1 < count ? row[k + 1] : bf16{});
    return 1.0f;
}
template <class Number>
INLINE float round_row(const Number* row, long count, long step, int8_t* to) {
    float largest = 0.0f;
    for (long k = 0; k < count; k++) largest = std::max(largest, std::fabs(widened(row[k])));
    float scale = largest / 127.0f;
    for (long k = 0; k < count; k++)
        to[k * step] = scale == 0.0f ? int8_t(0) : int8_t(std::nearbyint(widened(row[k]) / scale));
    return scale;
}

constexpr long panels_of(long outputs, long of_panel = PANEL) { return (outputs + of_panel - 1) / of_panel; }

// Hands out one run of memory, for the matrices of a model in the order in which a step reads them: most are
// smaller than a huge page, and a core reads one run as fast as it can.
class Shelf {
  public:
    void open(long bytes) { memory_.hold(bytes), left_ = bytes, next_ = memory_.as<char>(); }
    template <class Entry>
    Entry* take(long count) {
        long bytes = bytes_of<Entry>(count);
        if (bytes > left_) throw std::bad_alloc();
        left_ -= bytes;
        return reinterpret_cast<Entry*>(std::exchange(next_, next_ + bytes));
    }
    template <class Entry>
    static constexpr long bytes_of(long count) {
        return rounded_up(count * long(sizeof(Entry)), 64);
    }

  private:
    Memory memory_;
    long left_ = 0;
    char* next_ = nullptr;
};

// A matrix in panels, on a shelf. `scales`: of int8, a factor of every output; else none.
template <class Number, class Weight>
struct Matrix {
    long terms = 0, panels = 0;
    const Weight* weights = nullptr;
    std::vector<float> scales;

    static long bytes(long inputs, long panels) {
        return Shelf::bytes_of<Weight>(terms_of<Weight>(inputs) * panels * PANEL);
    }

    // `row_of(panel, column)`: which row of `source` a column is, -1 for none.
    template <class RowOf>
    void pack(Crew& crew, Shelf& shelf, const void* source, long inputs, long panels_, RowOf&& row_of) {
        terms = terms_of<Weight>(inputs), panels = panels_;
        Weight* packed = shelf.take<Weight>(terms * panels * PANEL);
        weights = packed;
        std::vector<float> factors(panels * PANEL, 1.0f);
        const Number* from = static_cast<const Number*>(source);
        Shares shares(crew, 1);
        crew.run([&](int) {
            shares.each(0, panels, [&](long panel) {
                for (int column = 0; column < PANEL; column++) {
                    long row = row_of(panel, column);
                    Weight* to = packed + panel * terms * PANEL + place_in_row<Weight>(column);
                    if (row < 0)
                        for (long t = 0; t < terms; t++) to[t * PANEL] = Weight{};
                    else
                        factors[panel * PANEL + column] = round_row(from + row * inputs, inputs, PANEL, to);
                }
            });
        });
        if (sizeof(Weight) < sizeof(Number)) scales = std::move(factors);
    }
    void pack(Crew& crew, Shelf& shelf, const void* source, long inputs, long outputs) {
        pack(crew, shelf, source, inputs, panels_of(outputs), [&](long panel, int column) {
            long row = panel * PANEL + column;
            return row < outputs ? row : -1;
        });
    }

    // Widens the weights of an output, as they were given.
    void unpack(long output, long inputs, float* to) const {
        constexpr int NUMBERS = Term<Weight>::NUMBERS;
        const Weight* from = weights + output / PANEL * terms * PANEL;
        from += place_in_row<Weight>(int(output % PANEL));
        for (long k = 0; k < inputs; k++) to[k] = number_of(from[k / NUMBERS * PANEL], k % NUMBERS);
    }
};

template <class Number>
std::vector<float> floats_of(const void* source, long count, long padded) {
    std::vector<float> numbers(source == nullptr ? 0 : padded, 0.0f);
    if (source != nullptr)
        for (long i = 0; i < count; i++) numbers[i] = widened(static_cast<const Number*>(source)[i]);
    return numbers;
}

template <class Number, class Weight>
struct Layer {
    std::vector<float> input_norm, qkv_bias, q_norm, k_norm, out_bias, mlp_norm;
    Matrix<Number, Weight> qkv, out, gate_up, down;
    bool uses_rope = false;
    long window = 0;
};

struct Problem {
    const char* sentence;
};
