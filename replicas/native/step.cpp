// A whole step of a Llama-like model on a paged KV pool, behind a plain C interface (`native_step.py` calls it).
//
// Rows are tokens of all sequences. Between two meetings of the threads each computes items that nobody else
// touches; which thread computes an item changes no number (`kernels.h` says why). K and V are rounded to what
// the pool stores and read back from it by everybody.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>

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
    int64_t is_float32, layer_count, hidden, inner, vocab, q_heads, kv_heads, head_dim;
    float norm_eps, attention_scale, rope_scale, embedding_multiplier, residual_multiplier, logits_divisor;
    const samovar_layer* layers;
    const void *embedding, *final_norm, *head;  // `embedding` is read by every step; the rest is copied
    const float* inverse_frequencies;           // [head_dim / 2]
};

// Steps are counted in numbers, not bytes.
struct samovar_step {
    int64_t rows, segments, table_words;
    const int32_t *token_ids, *positions, *slots;  // [rows]
    const int32_t *spans, *tables;                 // [segments, 4]: first row, rows, context, first table word
    void* pool;
    int64_t pages, block_tokens, heads_per_group;
    int64_t page_step, group_step, layer_step, value_step, slot_step, head_step;
    float* hidden;  // [rows, hidden], written
};
}

namespace {

constexpr int CHUNK = 4;                       // panels of an item
constexpr long BLOCK_BYTES = 384 << 10;        // of rows that stay in the L2 cache
constexpr int QUERY_ROWS = 48;                 // of an attention item: they share a block of keys
constexpr long HUGE_PAGE = 2 << 20;
constexpr float NEVER = -std::numeric_limits<float>::infinity();

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
    template <class Number>
    const Number* as() const {
        return static_cast<const Number*>(data_);
    }
    template <class Number>
    Number* as() {
        return static_cast<Number*>(data_);
    }

  private:
    void* data_ = nullptr;
    long bytes_ = 0;
};

// Rows in tiles of up to ROWS, as equal as can be. Number k of a tile's row lies at `begin * inputs + k * rows
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
};

template <class Number>
struct Matrix {
    long inputs = 0, panels = 0;
    Memory weights;

    // Packs panels; `row_of(panel, column)`: which row of `source` a column is, -1 for none.
    template <class RowOf>
    void pack(Crew& crew, const void* source, long inputs_, long panels_, RowOf&& row_of) {
        inputs = inputs_, panels = panels_;
        weights.hold(inputs * panels * PANEL * long(sizeof(Number)));
        const Number* from = static_cast<const Number*>(source);
        Shares shares(crew, 1);
        crew.run([&](int) {
            shares.each(0, panels, [&](long panel) {
                Number* to = weights.template as<Number>() + panel * inputs * PANEL;
                for (int column = 0; column < PANEL; column++) {
                    long row = row_of(panel, column);
                    int place = place_in_row<Number>(column);
                    for (long k = 0; k < inputs; k++)
                        to[k * PANEL + place] = row < 0 ? Number{} : from[row * inputs + k];
                }
            });
        });
    }
    void pack(Crew& crew, const void* source, long inputs_, long outputs) {
        pack(crew, source, inputs_, (outputs + PANEL - 1) / PANEL, [&](long panel, int column) {
            long row = panel * PANEL + column;
            return row < outputs ? row : -1;
        });
    }
};

template <class Number>
std::vector<float> floats_of(const void* source, long count, long padded) {
    std::vector<float> numbers(source == nullptr ? 0 : padded, 0.0f);
    if (source != nullptr)
        for (long i = 0; i < count; i++) numbers[i] = widened(static_cast<const Number*>(source)[i]);
    return numbers;
}

template <class Number>
struct Layer {
    std::vector<float> input_norm, qkv_bias, q_norm, k_norm, out_bias, mlp_norm;
    Matrix<Number> qkv, out, gate_up, down;
    bool uses_rope = false;
    long window = 0;
};

struct Problem {
    const char* sentence;
};

class Model {
  public:
    virtual ~Model() = default;
    virtual void step(const samovar_step& step) = 0;
    virtual void logits(const float* hidden, long all, const int64_t* rows, long count, float* out) = 0;
};

template <class Number>
class ModelOf : public Model {
  public:
    ModelOf(const samovar_model& given, int threads) : has_(given), crew_(threads), own_(threads) {
        group_ = has_.q_heads / has_.kv_heads;
        q_width_ = has_.q_heads * has_.head_dim;
        kv_width_ = has_.kv_heads * has_.head_dim;
        qkv_step_ = rounded_up(q_width_ + 2 * kv_width_, PANEL);
        x_step_ = rounded_up(has_.hidden, PANEL);
        value_step_ = rounded_up(has_.head_dim, PANEL);
        embedding_ = static_cast<const Number*>(given.embedding);
        frequencies_.assign(given.inverse_frequencies, given.inverse_frequencies + has_.head_dim / 2);
        final_norm_ = floats_of<Number>(given.final_norm, has_.hidden, has_.hidden);
        head_.pack(crew_, given.head, has_.hidden, has_.vocab);
        layers_.resize(has_.layer_count);
        for (long i = 0; i < has_.layer_count; i++) take(layers_[i], given.layers[i]);
        has_.layers = nullptr;
        nothing_.assign(has_.head_dim, Number{});
        for (Own& own : own_) {
            own.sums.floats(ROWS * CHUNK * PANEL);
            own.row.floats(x_step_);
            own.tile.floats(ROWS * has_.hidden);
            long query_rows = std::max<long>(QUERY_ROWS, group_);
            own.query.floats(query_rows * has_.head_dim);
            own.keys.floats(PANEL * has_.head_dim);
            std::fill_n(own.values.floats(PANEL * value_step_), PANEL * value_step_, 0.0f);
            own.scores.floats(ROWS * PANEL);
            own.heads.floats(query_rows * value_step_);
            own.weight.floats(query_rows * PANEL);
            own.top.floats(query_rows);
        }
    }

    void step(const samovar_step& step) override {
        check(step);
        rotate_up_to(1 + *std::max_element(step.positions, step.positions + step.rows));
        x_.floats(step.rows * x_step_);
        qkv_.floats(step.rows * qkv_step_);
        packed_.floats(step.rows * has_.hidden);
        attended_.floats(step.rows * q_width_);
        inner_.floats(step.rows * has_.inner);
        std::vector<Queries> queries = queries_of(step);
        Shares shares(crew_, 2 + 8 * has_.layer_count);
        crew_.run([&](int member) { compute(step, queries, shares, own_[member]); });
    }

    void logits(const float* hidden, long all, const int64_t* rows, long count, float* out) override {
        for (long i = 0; i < count; i++)
            if (rows[i] < 0 || rows[i] >= all) throw Problem{"a row of the logits is none of the step's"};
        Tiles tiles(count);
        packed_.floats(count * has_.hidden);
        Shares shares(crew_, 2);
        crew_.run([&](int member) {
            Own& own = own_[member];
            shares.each(0, tiles.count, [&](long tile) {
                for (int i = 0; i < tiles.size(tile); i++) {
                    const float* from = hidden + rows[tiles.begin(tile) + i] * has_.hidden;
                    put_row(from, tiles, tile, i, has_.hidden, packed_.template as<float>());
                }
            });
            multiply(shares, 1, own, head_, tiles, packed_.template as<float>(),
                     [&](long tile, long panel, int panels, const float* sums) {
                         long first = panel * PANEL, end = std::min(has_.vocab, first + panels * PANEL);
                         for (int i = 0; i < tiles.size(tile); i++) {
                             float* to = out + (tiles.begin(tile) + i) * has_.vocab;
                             const float* from = sums + i * CHUNK * PANEL - first;
                             if (has_.logits_divisor == 1.0f)
                                 for (long j = first; j < end; j++) to[j] = from[j];
                             else
                                 for (long j = first; j < end; j++) to[j] = from[j] / has_.logits_divisor;
                         }
                     });
        });
    }

  private:
    struct Own {  // scratch of one member
        Memory sums, row, tile, query, keys, values, scores, heads, weight, top;
    };
    struct Queries {  // tokens of a segment that share blocks of keys
        long segment, first, count;
    };

    void take(Layer<Number>& layer, const samovar_layer& given) {
        long hidden = has_.hidden, inner = has_.inner, width = q_width_ + 2 * kv_width_;
        layer.input_norm = floats_of<Number>(given.input_norm, hidden, hidden);
        layer.mlp_norm = floats_of<Number>(given.mlp_norm, hidden, hidden);
        layer.q_norm = floats_of<Number>(given.q_norm, has_.head_dim, has_.head_dim);
        layer.k_norm = floats_of<Number>(given.k_norm, has_.head_dim, has_.head_dim);
        layer.qkv_bias = floats_of<Number>(given.qkv_bias, width, qkv_step_);
        layer.out_bias = floats_of<Number>(given.out_bias, hidden, x_step_);
        layer.uses_rope = given.uses_rope != 0;
        layer.window = given.window;
        layer.qkv.pack(crew_, given.qkv, hidden, width);
        layer.out.pack(crew_, given.out, q_width_, hidden);
        layer.down.pack(crew_, given.down, inner, hidden);
        // A panel is half a panel of the gate and the half of `up` that belongs to it.
        layer.gate_up.pack(crew_, given.gate_up, hidden, (inner + HALF - 1) / HALF, [&](long panel, int column) {
            long row = panel * HALF + column % HALF;
            return row >= inner ? -1 : column < HALF ? row : inner + row;
        });
    }

    void check(const samovar_step& step) const {
        auto within = [](const int32_t* numbers, long count, long end) {
            return std::all_of(numbers, numbers + count, [&](int32_t one) { return one >= 0 && one < end; });
        };
        if (step.rows < 1) throw Problem{"a step has no rows"};
        if (!within(step.token_ids, step.rows, has_.vocab)) throw Problem{"a token is none of the vocabulary's"};
        if (!within(step.positions, step.rows, INT32_MAX)) throw Problem{"a position is negative"};
        if (!within(step.slots, step.rows, step.pages * step.block_tokens))
            throw Problem{"a slot is none of the pool's"};
        if (!within(step.tables, step.table_words, step.pages)) throw Problem{"a page is none of the pool's"};
        for (long i = 0; i < step.segments; i++) {
            const int32_t* span = step.spans + 4 * i;
            long blocks = (span[2] + step.block_tokens - 1) / step.block_tokens;
            if (span[0] < 0 || span[1] < 1 || span[0] + span[1] > step.rows || span[1] > span[2] || span[3] < 0 ||
                span[3] + blocks > step.table_words)
                throw Problem{"a span is none of the step's"};
        }
    }

    // cos and sin of every position so far, [positions, head_dim / 2] each, from one function of one number.
    void rotate_up_to(long positions) {
        long half = has_.head_dim / 2, known = half ? long(cosines_.size()) / half : positions;
        if (positions <= known) return;
        positions = rounded_up(positions, 256);
        cosines_.resize(positions * half);
        sines_.resize(positions * half);
        for (long position = known; position < positions; position++)
            for (long i = 0; i < half; i++) {
                double angle = float(position) * frequencies_[i];
                cosines_[position * half + i] = float(std::cos(angle)) * has_.rope_scale;
                sines_[position * half + i] = float(std::sin(angle)) * has_.rope_scale;
            }
    }

    std::vector<Queries> queries_of(const samovar_step& step) const {
        std::vector<Queries> queries;
        long together = std::max<long>(1, QUERY_ROWS / group_);
        for (long segment = 0; segment < step.segments; segment++) {
            long count = step.spans[4 * segment + 1];
            for (long first = 0; first < count; first += together)
                queries.push_back({segment, first, std::min(together, count - first)});
        }
        auto keys = [&](const Queries& one) {
            const int32_t* span = step.spans + 4 * one.segment;
            return span[2] - span[1] + one.first + one.count;
        };
        std::stable_sort(queries.begin(), queries.end(),
                         [&](const Queries& a, const Queries& b) { return keys(a) > keys(b); });
        return queries;
    }

    void compute(const samovar_step& step, const std::vector<Queries>& queries, Shares& shares, Own& own) {
        Tiles tiles(step.rows);
        long phase = 0, hidden = has_.hidden;
        float *x = x_.template as<float>(), *qkv = qkv_.template as<float>();
        float *attended = attended_.template as<float>(), *inner = inner_.template as<float>();
        auto add = [&](const std::vector<float>& bias) {
            return [&](long tile, long panel, int panels, const float* sums) {
                for (int i = 0; i < tiles.size(tile); i++) {
                    float* to = x + (tiles.begin(tile) + i) * x_step_ + panel * PANEL;
                    const float *from = sums + i * CHUNK * PANEL, *more = bias.data() + panel * PANEL;
                    for (int j = 0; j < panels * PANEL; j++) {
                        float sum = bias.empty() ? from[j] : from[j] + more[j];
                        to[j] += has_.residual_multiplier * sum;
                    }
                }
            };
        };
        shares.each(phase++, tiles.count, [&](long tile) {
            for (long row = tiles.begin(tile); row < tiles.begin(tile + 1); row++) embed(step, row, x);
            blank(step, tiles, tile, attended);
        });
        for (long number = 0; number < has_.layer_count; number++) {
            const Layer<Number>& layer = layers_[number];
            const float* packed = norm(shares, phase++, own, tiles, layer.input_norm);
            multiply(shares, phase++, own, layer.qkv, tiles, packed,
                     [&](long tile, long panel, int panels, const float* sums) {
                         for (int i = 0; i < tiles.size(tile); i++) {
                             float* to = qkv + (tiles.begin(tile) + i) * qkv_step_ + panel * PANEL;
                             const float *from = sums + i * CHUNK * PANEL;
                             const float *more = layer.qkv_bias.data() + panel * PANEL;
                             if (layer.qkv_bias.empty())
                                 for (int j = 0; j < panels * PANEL; j++) to[j] = from[j];
                             else
                                 for (int j = 0; j < panels * PANEL; j++) to[j] = from[j] + more[j];
                         }
                     });
            shares.each(phase++, step.rows, [&](long row) { keep(step, layer, number, row, qkv); });
            shares.each(phase++, long(queries.size()) * has_.kv_heads, [&](long item) {
                attend(step, layer, number, queries[item / has_.kv_heads], item % has_.kv_heads, tiles, qkv,
                       attended, own);
            });
            multiply(shares, phase++, own, layer.out, tiles, attended, add(layer.out_bias));
            packed = norm(shares, phase++, own, tiles, layer.mlp_norm);
            multiply(shares, phase++, own, layer.gate_up, tiles, packed,
                     [&](long tile, long panel, int panels, const float* sums) {
                         gated(tiles, tile, panel, panels, sums, inner);
                     });
            multiply(shares, phase++, own, layer.down, tiles, inner, add({}));
        }
        shares.each(phase++, tiles.count, [&](long tile) {
            for (long row = tiles.begin(tile); row < tiles.begin(tile + 1); row++)
                normed(x + row * x_step_, final_norm_.data(), hidden, step.hidden + row * hidden);
        });
    }

    void embed(const samovar_step& step, long row, float* x) const {
        const Number* from = embedding_ + step.token_ids[row] * has_.hidden;
        float* to = x + row * x_step_;
        for (long k = 0; k < has_.hidden; k++) to[k] = widened(from[k]) * has_.embedding_multiplier;
        for (long k = has_.hidden; k < x_step_; k++) to[k] = 0.0f;
    }

    // Rows that are in no segment are attended to by nobody: they stay zero, so that all numbers are finite.
    void blank(const samovar_step& step, const Tiles& tiles, long tile, float* attended) const {
        long in_segments = 0;
        for (long i = 0; i < step.segments; i++) in_segments += step.spans[4 * i + 1];
        if (in_segments < step.rows)
            std::fill_n(attended + tiles.begin(tile) * q_width_, tiles.size(tile) * q_width_, 0.0f);
    }

    void normed(const float* from, const float* weight, long count, float* to) const {
        float scale = 1.0f / std::sqrt(sum_of_squares(from, count) / float(count) + has_.norm_eps);
        for (long k = 0; k < count; k++) to[k] = from[k] * scale * weight[k];
    }

    static void put_row(const float* from, const Tiles& tiles, long tile, int i, long inputs, float* packed) {
        float* to = packed + tiles.begin(tile) * inputs + i;
        for (long k = 0, rows = tiles.size(tile); k < inputs; k++) to[k * rows] = from[k];
    }

    // Returns the rows of x, normed and packed. One tile is packed by every member for itself: nobody waits.
    const float* norm(Shares& shares, long phase, Own& own, const Tiles& tiles, const std::vector<float>& weight) {
        auto pack = [&](long tile, float* packed) {
            float* row = own.row.template as<float>();
            for (int i = 0; i < tiles.size(tile); i++) {
                normed(x_.template as<float>() + (tiles.begin(tile) + i) * x_step_, weight.data(), has_.hidden, row);
                put_row(row, tiles, tile, i, has_.hidden, packed);
            }
        };
        if (tiles.count == 1) {
            pack(0, own.tile.template as<float>());
            return own.tile.template as<float>();
        }
        shares.each(phase, tiles.count, [&](long tile) { pack(tile, packed_.template as<float>()); });
        return packed_.template as<float>();
    }

    // Calls `done(tile, first panel, panels, sums [ROWS][CHUNK * PANEL])` for all outputs of all rows.
    template <class Done>
    void multiply(Shares& shares, long phase, Own& own, const Matrix<Number>& matrix, const Tiles& tiles,
                  const float* packed, Done&& done) {
        long inputs = matrix.inputs, chunks = (matrix.panels + CHUNK - 1) / CHUNK;
        long together = std::max<long>(1, BLOCK_BYTES / (ROWS * inputs * long(sizeof(float))));
        long blocks = (tiles.count + together - 1) / together;
        float* sums = own.sums.template as<float>();
        shares.each(phase, blocks * chunks, [&](long item) {
            long first = item % chunks * CHUNK, block = item / chunks;
            int panels = int(std::min<long>(CHUNK, matrix.panels - first));
            const Number* weights = matrix.weights.template as<Number>() + first * inputs * PANEL;
            for (long one = block * together; one < std::min(tiles.count, (block + 1) * together); one++) {
                tile<Number, 1, Sums::fresh>(tiles.size(one), packed + tiles.begin(one) * inputs, tiles.size(one),
                                             weights, panels, inputs * PANEL, PANEL, inputs, sums, CHUNK * PANEL);
                done(one, first, panels, sums);
            }
        });
    }

    void gated(const Tiles& tiles, long tile, long panel, int panels, const float* sums, float* inner) const {
        long rows = tiles.size(tile), all = has_.inner;
        for (int i = 0; i < rows; i++)
            for (int p = 0; p < panels; p++) {
                const float* gate = sums + i * CHUNK * PANEL + p * PANEL;
                long first = (panel + p) * HALF, here = std::min<long>(HALF, all - first);
                float product[HALF];
                for (int j = 0; j < HALF; j++)
                    product[j] = gate[j] / (1.0f + exponential(-gate[j])) * gate[HALF + j];
                float* to = inner + tiles.begin(tile) * all + first * rows + i;
                for (long j = 0; j < here; j++) to[j * rows] = product[j];
            }
    }

    // -- attention ------------------------------------------------------------------------------------------

    // Where K of a head in a slot of a page lies; V is `value_step` behind it.
    Number* place(const samovar_step& step, long layer, long page, long slot, long head) const {
        return static_cast<Number*>(step.pool) + page * step.page_step +
               head / step.heads_per_group * step.group_step + layer * step.layer_step + slot * step.slot_step +
               head % step.heads_per_group * step.head_step;
    }

    // Norms, rotates and scales a row's queries, and writes its K and V to the pool.
    void keep(const samovar_step& step, const Layer<Number>& layer, long number, long row, float* qkv) const {
        long width = has_.head_dim, page = step.slots[row] / step.block_tokens;
        float* query = qkv + row * qkv_step_;
        for (long head = 0; head < has_.q_heads; head++) {
            float* one = query + head * width;
            turn(layer, layer.q_norm, step.positions[row], one);
            for (long d = 0; d < width; d++) one[d] *= has_.attention_scale;
        }
        for (long head = 0; head < has_.kv_heads; head++) {
            float *key = query + q_width_ + head * width, *value = key + kv_width_;
            turn(layer, layer.k_norm, step.positions[row], key);
            Number* to = place(step, number, page, step.slots[row] % step.block_tokens, head);
            for (long d = 0; d < width; d++) narrow(key[d], to[d]);
            for (long d = 0; d < width; d++) narrow(value[d], to[step.value_step + d]);
        }
    }

    void turn(const Layer<Number>& layer, const std::vector<float>& norm, long position, float* head) const {
        if (!norm.empty()) normed(head, norm.data(), has_.head_dim, head);
        if (!layer.uses_rope) return;
        long half = has_.head_dim / 2;
        const float *cosine = cosines_.data() + position * half, *sine = sines_.data() + position * half;
        for (long i = 0; i < half; i++) {
            float low = head[i], high = head[half + i];
            head[i] = low * cosine[i] - high * sine[i];
            head[half + i] = high * cosine[i] + low * sine[i];
        }
    }

    // Finds K of PANEL tokens from `first` on, and V behind it; zeros from the context's end on.
    void find_keys(const samovar_step& step, long number, const int32_t* span, long first, long head,
                   const Number** keys, const Number** values) const {
        long page = first / step.block_tokens, slot = first % step.block_tokens;
        for (int j = 0; j < PANEL; j++) {
            if (first + j >= span[2]) {
                keys[j] = values[j] = nothing_.data();
                continue;
            }
            keys[j] = place(step, number, step.tables[span[3] + page], slot, head);
            values[j] = keys[j] + step.value_step;
            if (++slot == step.block_tokens) slot = 0, page++;
        }
    }

    // Attends for the query heads of one KV head; the softmax is carried from block to block of keys.
    void attend(const samovar_step& step, const Layer<Number>& layer, long number, const Queries& queries, long head,
                const Tiles& tiles, const float* qkv, float* attended, Own& own) const {
        const int32_t* span = step.spans + 4 * queries.segment;
        long width = has_.head_dim, rows = queries.count * group_, row_of_first = span[0] + queries.first;
        long position = span[2] - span[1] + queries.first;  // of the first token
        float *query = own.query.template as<float>(), *heads = own.heads.template as<float>();
        float *weight = own.weight.template as<float>(), *top = own.top.template as<float>();
        Tiles parts(rows);
        for (long part = 0; part < parts.count; part++)
            for (int i = 0; i < parts.size(part); i++) {
                long row = parts.begin(part) + i;
                const float* from = qkv + (row_of_first + row / group_) * qkv_step_;
                put_row(from + (head * group_ + row % group_) * width, parts, part, i, width, query);
            }
        std::fill_n(heads, rows * value_step_, 0.0f);
        std::fill_n(weight, rows * PANEL, 0.0f);
        std::fill_n(top, rows, NEVER);
        long first = layer.window ? std::max<long>(0, position - layer.window + 1) / PANEL : 0;
        long last = (position + queries.count - 1) / PANEL;
        const Number *keys[PANEL], *values[PANEL];
        for (long turn = first; turn <= last; turn++) {
            long block = turn;
#if SAMOVAR_FAULT == 2
            if (queries.count > 1 && last > first + 1 && turn <= first + 1) block = 2 * first + 1 - turn;
#endif
            find_keys(step, number, span, block * PANEL, head, keys, values);
            transpose(keys, width, own.keys.template as<float>());
            for (int j = 0; j < PANEL; j++)
                widen_run(values[j], own.values.template as<float>() + j * value_step_, width);
            for (long part = 0; part < parts.count; part++)
                attend_part(layer, parts, part, position, block * PANEL, own);
        }
        for (long row = 0; row < rows; row++) {
            float sum = 0.0f;
            for (int j = 0; j < PANEL; j++) sum += weight[row * PANEL + j];
            long at = row_of_first + row / group_, tile = tiles.of(at), size = tiles.size(tile);
            float* to = attended + tiles.begin(tile) * q_width_ + at - tiles.begin(tile);
            to += (head * group_ + row % group_) * width * size;
            const float* from = heads + row * value_step_;
            for (long d = 0; d < width; d++) to[d * size] = from[d] / sum;
        }
    }

    // Attends of a tile of queries to a block of keys, whose first is token `first`.
    void attend_part(const Layer<Number>& layer, const Tiles& parts, long part, long position, long first,
                     Own& own) const {
        long begin = parts.begin(part), size = parts.size(part), width = has_.head_dim;
        float *scores = own.scores.template as<float>(), *values = own.values.template as<float>();
        float* heads = own.heads.template as<float>() + begin * value_step_;
        auto seen_from = [&](long i) {
            long token = position + (begin + i) / group_;
            return layer.window ? std::max<long>(0, token - layer.window + 1 - first) : 0;
        };
        auto seen_to = [&](long i) { return std::min<long>(PANEL, position + (begin + i) / group_ + 1 - first); };
        long low = 0, high = size;  // the rows that see any of it
        while (low < high && seen_to(low) <= 0) low++;
        while (high > low && seen_from(high - 1) >= PANEL) high--;
        if (low == high) return;
        tile<float, 1, Sums::fresh>(int(high - low), own.query.template as<float>() + begin * width + low, size,
                                    own.keys.template as<float>(), 1, 0, PANEL, width, scores, PANEL);
        for (long i = low; i < high; i++)
            soften(scores + (i - low) * PANEL, seen_from(i), seen_to(i), begin + i, heads + i * value_step_, own);
        int panels = int(value_step_ / PANEL);
        for (long i = low, end; i < high; i = end) {
            long from = seen_from(i), to = seen_to(i);
            end = i + 1;
            if (from == 0 && to == PANEL)  // as many rows as possible, if they see all of it
                while (end < high && seen_from(end) == 0 && seen_to(end) == PANEL) end++;
            // What a row does not see is no part of its sums: not even 0 times it.
            tile<float, PANEL, Sums::continued>(int(end - i), scores + (i - low) * PANEL + from, 1,
                                                values + from * value_step_, panels, PANEL, value_step_, to - from,
                                                heads + i * value_step_, value_step_);
        }
    }

    // Makes scores `[from, to)` of a row shares of its softmax so far, the others 0.
    void soften(float* scores, long from, long to, long row, float* head, Own& own) const {
        float *weight = own.weight.template as<float>() + row * PANEL, &top = own.top.template as<float>()[row];
        for (long j = 0; j < from; j++) scores[j] = NEVER;
        for (long j = to; j < PANEL; j++) scores[j] = NEVER;
        float higher = largest(scores);
        higher = higher > top ? higher : top;
        float shrunk = exponential(top - higher);
        top = higher;
        for (int j = 0; j < PANEL; j++) {
            scores[j] = exponential(scores[j] - higher);
            weight[j] = __builtin_fmaf(weight[j], shrunk, scores[j]);
        }
        if (shrunk != 1.0f)
            for (long d = 0; d < value_step_; d++) head[d] *= shrunk;
    }

    samovar_model has_;
    Crew crew_;
    long group_, q_width_, kv_width_, qkv_step_, x_step_, value_step_;
    const Number* embedding_;
    std::vector<float> frequencies_, final_norm_, cosines_, sines_;
    std::vector<Number> nothing_;
    Matrix<Number> head_;
    std::vector<Layer<Number>> layers_;
    Memory x_, qkv_, packed_, attended_, inner_;
    std::vector<Own> own_;
};

template <class Call>
const char* guarded(Call&& call) {
    try {
        call();
        return nullptr;
    } catch (const Problem& problem) {
        return problem.sentence;
    } catch (const std::bad_alloc&) {
        return "out of memory";
    } catch (const std::exception&) {
        return "a thread could not be started";
    }
}

}  // namespace

extern "C" {

// Returns null, or a sentence that says what is wrong.
const char* samovar_open(const samovar_model* given, int threads, void** opened) {
    return guarded([&] {
        if (given->is_float32)
            *opened = static_cast<Model*>(new ModelOf<float>(*given, threads));
        else
            *opened = static_cast<Model*>(new ModelOf<bf16>(*given, threads));
    });
}

void samovar_close(void* opened) { delete static_cast<Model*>(opened); }

const char* samovar_run(void* opened, const samovar_step* step) {
    return guarded([&] { static_cast<Model*>(opened)->step(*step); });
}

// Writes the logits `[count, vocab]` of `rows` of `hidden` `[all, hidden]`.
const char* samovar_logits(void* opened, const float* hidden, int64_t all, const int64_t* rows, int64_t count,
                           float* out) {
    return guarded([&] { static_cast<Model*>(opened)->logits(hidden, all, rows, count, out); });
}
}
