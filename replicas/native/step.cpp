// A whole step of a Llama-like model on a paged KV pool, behind a plain C interface (`native_step.py` calls it).
//
// Rows are tokens of all sequences. Between two meetings of the threads each computes items that nobody else
// touches; which thread computes an item changes no number (`kernels.h` says why). K and V are rounded to what
// the pool stores and read back from it by everybody.

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <vector>

#include "attention.h"
#include "crew.h"
#include "exponential.h"
#include "kernels.h"
#include "weights.h"

// A library computes with one kind of number, bf16 or float, in which K and V are kept; its weights are of that
// kind, or rounded to int8; `pair`: in bf16, multiplied in pairs with activations that are rounded to bf16, too.
#ifndef SAMOVAR_NUMBER
#define SAMOVAR_NUMBER bf16
#endif
#ifndef SAMOVAR_WEIGHT
#define SAMOVAR_WEIGHT SAMOVAR_NUMBER
#endif

namespace {

constexpr long DOT_TRIALS = 3000;  // of W products each: some milliseconds

template <class Number, class Weight>
class Model {
    using Entry = TermOf<Weight>;  // of what rows are packed into
    static constexpr bool IS_ROUNDED = sizeof(Weight) < sizeof(Number);

  public:
    Model(const samovar_model& given, int threads)
        : has_(checked(given)), crew_(threads), attention_(given.q_heads, given.kv_heads, given.head_dim), own_(threads) {
        q_width_ = has_.q_heads * has_.head_dim;
        kv_width_ = has_.kv_heads * has_.head_dim;
        qkv_step_ = rounded_up(q_width_ + 2 * kv_width_, PANEL);
        x_step_ = rounded_up(has_.hidden, PANEL);
        if (IS_ROUNDED || given.embedding != given.head) embedding_ = static_cast<const Number*>(given.embedding);
        frequencies_.assign(given.inverse_frequencies, given.inverse_frequencies + has_.head_dim / 2);
        final_norm_ = floats_of<Number>(given.final_norm, has_.hidden, has_.hidden);
        shelf_.open(weight_bytes());
        layers_.resize(has_.layer_count);
        for (long i = 0; i < has_.layer_count; i++) take(layers_[i], given.layers[i]);
        head_.pack(crew_, shelf_, given.head, has_.hidden, has_.vocab);
        has_.layers = nullptr;
        for (Own& own : own_) {
            own.sums.floats(ROWS * CHUNK * PANEL);
            own.rows.floats(ROWS * x_step_);
            own.tile.template entries<Entry>(ROWS * terms(has_.hidden));
            attention_.prepare(own.attention);
        }
    }

    bool reads_embedding() const { return embedding_ != nullptr; }

    void step(const samovar_step& step) {
        check(step);
        rotate_up_to(1 + *std::max_element(step.positions, step.positions + step.rows));
        x_.floats(step.rows * x_step_);
        qkv_.floats(step.rows * qkv_step_);
        packed_.template entries<Entry>(step.rows * terms(has_.hidden));
        attended_.template entries<Entry>(step.rows * terms(q_width_));
        inner_.template entries<Entry>(step.rows * terms(has_.inner));
        std::vector<Queries> queries = attention_.queries_of(step, crew_.members(), false), last;
        if (step.is_part()) last = attention_.queries_of(step, crew_.members(), true);
        Shares shares(crew_, 3 + 8 * has_.layer_count);
        crew_.run([&](int member) { compute(step, queries, last, shares, own_[member]); });
    }

    void logits(const float* hidden, long all, const int32_t* rows, long count, float* out) {
        for (long i = 0; i < count; i++)
            if (rows[i] < 0 || rows[i] >= all) throw Problem{"a row of the logits is none of the step's"};
        Tiles tiles(count);
        Entry* packed = packed_.template entries<Entry>(count * terms(has_.hidden));
        Shares shares(crew_, 2);
        crew_.run([&](int member) {
            Own& own = own_[member];
            shares.each(0, tiles.count, [&](long tile) {
                for (int i = 0; i < tiles.size(tile); i++) {
                    const float* from = hidden + rows[tiles.begin(tile) + i] * has_.hidden;
                    tiles.put(from, tile, i, 0, has_.hidden, terms(has_.hidden), packed);
                }
            });
            multiply(shares, 1, own, head_, tiles, packed,
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
        Memory sums, rows, tile;
        typename Attention<Number, Entry>::Own attention;
    };

    static const samovar_model& checked(const samovar_model& given) {
        if constexpr (Term<Weight>::NUMBERS == 2) {
            if (given.head_dim % 2) throw Problem{"its heads have an odd size"};
            if (!dots_are_right(DOT_TRIALS)) throw Problem{"this CPU's dot products in bf16 have other bits than others'"};
        }
        return given;
    }

    static long terms(long numbers) { return terms_of<Weight>(numbers); }

    long weight_bytes() const {
        using Packed = Matrix<Number, Weight>;
        long of_layer = Packed::bytes(has_.hidden, panels_of(q_width_ + 2 * kv_width_)) +
                        Packed::bytes(q_width_, panels_of(has_.hidden)) +
                        Packed::bytes(has_.hidden, panels_of(has_.inner, HALF)) +
                        Packed::bytes(has_.inner, panels_of(has_.hidden));
        return has_.layer_count * of_layer + Packed::bytes(has_.hidden, panels_of(has_.vocab));
    }

    void take(Layer<Number, Weight>& layer, const samovar_layer& given) {
        long hidden = has_.hidden, inner = has_.inner, width = q_width_ + 2 * kv_width_;
        layer.input_norm = floats_of<Number>(given.input_norm, hidden, hidden);
        layer.mlp_norm = floats_of<Number>(given.mlp_norm, hidden, hidden);
        layer.q_norm = floats_of<Number>(given.q_norm, has_.head_dim, has_.head_dim);
        layer.k_norm = floats_of<Number>(given.k_norm, has_.head_dim, has_.head_dim);
        layer.qkv_bias = floats_of<Number>(given.qkv_bias, width, qkv_step_);
        layer.out_bias = floats_of<Number>(given.out_bias, hidden, x_step_);
        layer.uses_rope = given.uses_rope != 0;
        layer.window = given.window;
        layer.qkv.pack(crew_, shelf_, given.qkv, hidden, width);
        layer.out.pack(crew_, shelf_, given.out, q_width_, hidden);
        // A panel is half a panel of the gate and the half of `up` that belongs to it.
        layer.gate_up.pack(crew_, shelf_, given.gate_up, hidden, panels_of(inner, HALF), [&](long panel, int column) {
            long row = panel * HALF + column % HALF;
            return row >= inner ? -1 : column < HALF ? row : inner + row;
        });
        layer.down.pack(crew_, shelf_, given.down, inner, hidden);
    }

    void check(const samovar_step& step) const {
        auto within = [](const int32_t* numbers, long count, long end) {
            return std::all_of(numbers, numbers + count, [&](int32_t one) { return one >= 0 && one < end; });
        };
        if (step.rows < 1) throw Problem{"a step has no rows"};
        if (step.layers < 1 || step.layers > has_.layer_count) throw Problem{"it has not so many layers"};
        if (!within(step.token_ids, step.rows, has_.vocab)) throw Problem{"a token is none of the vocabulary's"};
        if (!within(step.positions, step.rows, step.pages * step.block_tokens))
            throw Problem{"a position is behind all that the pool holds"};
        if (!within(step.slots, step.rows, step.pages * step.block_tokens))
            throw Problem{"a slot is none of the pool's"};
        if (!within(step.tables, step.table_words, step.pages)) throw Problem{"a page is none of the pool's"};
        for (long i = 0; i < step.segments; i++) {
            const int32_t* span = step.spans + 4 * i;
            long row = span[0], count = span[1], tokens = span[2], table = span[3];  // sums of int32 may overflow
            long blocks = (tokens + step.block_tokens - 1) / step.block_tokens;
            if (row < 0 || count < 1 || row + count > step.rows || count > tokens || table < 0 ||
                table + blocks > step.table_words)
                throw Problem{"a span is none of the step's"};
        }
        if (step.is_part()) check_wanted(step);
    }

    static void check_wanted(const samovar_step& step) {
        for (long i = 0; i < step.wanted_rows; i++)
            if (step.wanted[i] < (i ? step.wanted[i - 1] + 1 : 0) || step.wanted[i] >= step.rows)
                throw Problem{"a wanted row is none of the step's, or they do not ascend"};
        long found = 0;
        for (const Run& run : runs_of(step, true)) found += run.count;
        if (found != step.wanted_rows) throw Problem{"a wanted row is in no segment, or in several"};
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

    // `last`: the items of the last layer if only some rows are wanted. All rows need its K and V, and only these
    // what is behind: they move together, in their order, and no row's numbers depend on another's place.
    void compute(const samovar_step& step, const std::vector<Queries>& queries, const std::vector<Queries>& last,
                 Shares& shares, Own& own) {
        Tiles tiles(step.rows);
        const std::vector<Queries>* items = &queries;
        long phase = 0, hidden = has_.hidden;
        float *x = x_.template as<float>(), *qkv = qkv_.template as<float>();
        Entry *attended = attended_.template as<Entry>(), *inner = inner_.template as<Entry>();
        auto add = [&](const std::vector<float>& bias) {
            return [&](long tile, long panel, int panels, const float* sums) {
                float multiplier = has_.residual_multiplier;
                for (int i = 0; i < tiles.size(tile); i++) {
                    float* __restrict to = x + (tiles.begin(tile) + i) * x_step_ + panel * PANEL;
                    const float *from = sums + i * CHUNK * PANEL, *more = bias.data() + panel * PANEL;
                    if (bias.empty())
                        for (int j = 0; j < panels * PANEL; j++) to[j] += multiplier * from[j];
                    else
                        for (int j = 0; j < panels * PANEL; j++) to[j] += multiplier * (from[j] + more[j]);
                }
            };
        };
        shares.each(phase++, tiles.count, [&](long tile) {
            for (long row = tiles.begin(tile); row < tiles.begin(tile + 1); row++) embed(step, row, x);
            blank(step, tiles, tile, attended);
        });
        for (long number = 0; number < step.layers; number++) {
            const Layer<Number, Weight>& layer = layers_[number];
            const Entry* packed = norm(shares, phase++, own, tiles, layer.input_norm);
            multiply(shares, phase++, own, layer.qkv, tiles, packed,
                     [&](long tile, long panel, int panels, const float* sums) {
                         for (int i = 0; i < tiles.size(tile); i++) {
                             float* __restrict to = qkv + (tiles.begin(tile) + i) * qkv_step_ + panel * PANEL;
                             const float *from = sums + i * CHUNK * PANEL;
                             const float *more = layer.qkv_bias.data() + panel * PANEL;
                             if (layer.qkv_bias.empty())
                                 for (int j = 0; j < panels * PANEL; j++) to[j] = from[j];
                             else
                                 for (int j = 0; j < panels * PANEL; j++) to[j] = from[j] + more[j];
                         }
                     });
            shares.each(phase++, step.rows, [&](long row) { keep(step, layer, number, row, qkv); });
            if (step.is_part() && number == step.layers - 1) {
                shares.each(phase++, 1, [&](long) { keep_wanted(step, x); });
                tiles = Tiles(step.wanted_rows);
                items = &last;
                if (step.wanted_rows == 0) return;
            }
            shares.each(phase++, long(items->size()), [&](long item) {
                attention_.attend(step, number, layer.window, (*items)[item], tiles, {qkv, qkv_step_},
                                  {attended, terms(q_width_)}, own.attention);
            });
            multiply(shares, phase++, own, layer.out, tiles, attended, add(layer.out_bias));
            packed = norm(shares, phase++, own, tiles, layer.mlp_norm);
            multiply(shares, phase++, own, layer.gate_up, tiles, packed,
                     [&](long tile, long panel, int panels, const float* sums) {
                         gated(tiles, tile, panel, panels, sums, inner);
                     });
            multiply(shares, phase++, own, layer.down, tiles, inner, add(no_bias_));
        }
        shares.each(phase++, tiles.count, [&](long tile) {
            for (long row = tiles.begin(tile); row < tiles.begin(tile + 1); row++) {
                long to = step.is_part() ? step.wanted[row] : row;
                normed(x + row * x_step_, final_norm_.data(), hidden, step.hidden + to * hidden);
            }
        });
    }

    // Moves the wanted rows of x to its beginning, and marks all rows of the result as not computed.
    void keep_wanted(const samovar_step& step, float* x) const {
        std::fill_n(step.hidden, step.rows * has_.hidden, std::numeric_limits<float>::quiet_NaN());
        for (long i = 0; i < step.wanted_rows; i++) {
#if SAMOVAR_FAULT == 4
            long row = std::max(0, step.wanted[i] - 1);
#else
            long row = step.wanted[i];
#endif
            if (row != i) std::copy_n(x + row * x_step_, x_step_, x + i * x_step_);
        }
    }

    void embed(const samovar_step& step, long row, float* x) const {
        long token = step.token_ids[row];
        float* to = x + row * x_step_;
        if (embedding_ != nullptr)
            for (long k = 0; k < has_.hidden; k++) to[k] = widened(embedding_[token * has_.hidden + k]);
        else if constexpr (!IS_ROUNDED)
            head_.unpack(token, has_.hidden, to);
        for (long k = 0; k < has_.hidden; k++) to[k] *= has_.embedding_multiplier;
        for (long k = has_.hidden; k < x_step_; k++) to[k] = 0.0f;
    }

    // Rows that are in no segment are attended to by nobody: they stay zero, so that all numbers are finite.
    void blank(const samovar_step& step, const Tiles& tiles, long tile, Entry* attended) const {
        long in_segments = 0;
        for (long i = 0; i < step.segments; i++) in_segments += step.spans[4 * i + 1];
        if (in_segments < step.rows)
            std::fill_n(attended + tiles.begin(tile) * terms(q_width_), tiles.size(tile) * terms(q_width_), Entry{});
    }

    void normed(const float* from, const float* weight, long count, float* to) const {
        float scale = 1.0f / std::sqrt(sum_of_squares(from, count) / float(count) + has_.norm_eps);
        for (long k = 0; k < count; k++) to[k] = from[k] * scale * weight[k];
    }

    // Returns the rows of x, normed and packed. One tile is packed by every member for itself: nobody waits.
    const Entry* norm(Shares& shares, long phase, Own& own, const Tiles& tiles, const std::vector<float>& weight) {
        auto pack = [&](long tile, Entry* packed) {
            const float *x = x_.template as<float>() + tiles.begin(tile) * x_step_, *rows[ROWS];
            for (int i = 0; i < tiles.size(tile); i++) {
                float* row = own.rows.template as<float>() + i * x_step_;
                normed(x + i * x_step_, weight.data(), has_.hidden, row);
                rows[i] = row;
            }
            tiles.put_all(rows, tiles.size(tile), tile, 0, 0, has_.hidden, terms(has_.hidden), packed);
        };
        if (tiles.count == 1) {
            pack(0, own.tile.template as<Entry>());
            return own.tile.template as<Entry>();
        }
        shares.each(phase, tiles.count, [&](long tile) { pack(tile, packed_.template as<Entry>()); });
        return packed_.template as<Entry>();
    }

    // Calls `done(tile, first panel, panels, sums [ROWS][CHUNK * PANEL])` for all outputs of all rows.
    template <class Done>
    void multiply(Shares& shares, long phase, Own& own, const Matrix<Number, Weight>& matrix, const Tiles& tiles,
                  const Entry* packed, Done&& done) {
        long terms = matrix.terms, chunks = (matrix.panels + CHUNK - 1) / CHUNK;
        long together = std::max<long>(1, BLOCK_BYTES / (ROWS * terms * long(sizeof(Entry))));
        long blocks = (tiles.count + together - 1) / together;
        float* sums = own.sums.template as<float>();
        shares.each(phase, blocks * chunks, [&](long item) {
            long first = item % chunks * CHUNK, block = item / chunks;
            int panels = int(std::min<long>(CHUNK, matrix.panels - first));
            const Weight* weights = matrix.weights + first * terms * PANEL;
            for (long one = block * together; one < std::min(tiles.count, (block + 1) * together); one++) {
                tile<Weight, 1, Sums::of_memory>(tiles.size(one), packed + tiles.begin(one) * terms, tiles.size(one),
                                             weights, panels, terms * PANEL, PANEL, terms, sums, CHUNK * PANEL);
                if (!matrix.scales.empty()) scale(tiles.size(one), panels, matrix.scales.data() + first * PANEL, sums);
                done(one, first, panels, sums);
            }
        });
    }

    static void scale(int rows, int panels, const float* scales, float* sums) {
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < panels * PANEL; j++) sums[i * CHUNK * PANEL + j] *= scales[j];
    }

    void gated(const Tiles& tiles, long tile, long panel, int panels, const float* sums, Entry* inner) const {
        long first = panel * HALF, here = std::min(panels * long(HALF), has_.inner - first);
        float products[ROWS][CHUNK * HALF];
        const float* rows[ROWS];
        for (int i = 0; i < tiles.size(tile); i++) {
            rows[i] = products[i];
            for (int p = 0; p < panels; p++) {
                const float* gate = sums + i * CHUNK * PANEL + p * PANEL;
                float* product = products[i] + p * HALF;
                for (int j = 0; j < HALF; j++)
                    product[j] = gate[j] / (1.0f + exponential(-gate[j])) * gate[HALF + j];
            }
        }
        tiles.put_all(rows, tiles.size(tile), tile, 0, first, here, terms(has_.inner), inner);
    }

    // Norms, rotates and scales a row's queries, and writes its K and V to the pool.
    void keep(const samovar_step& step, const Layer<Number, Weight>& layer, long number, long row, float* qkv) const {
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
            Number* to = place<Number>(step, number, page, step.slots[row] % step.block_tokens) + shift_of(step, head);
            for (long d = 0; d < width; d++) narrow(key[d], to[d]);
            for (long d = 0; d < width; d++) narrow(value[d], to[step.value_step + d]);
        }
    }

    void turn(const Layer<Number, Weight>& layer, const std::vector<float>& norm, long position, float* head) const {
        if (!norm.empty()) normed(head, norm.data(), has_.head_dim, head);
        if (!layer.uses_rope) return;
        long half = has_.head_dim / 2;
        const float *cosine = cosines_.data() + position * half, *sine = sines_.data() + position * half;
        float *__restrict lows = head, *__restrict highs = head + half;
        for (long i = 0; i < half; i++) {
            float low = lows[i], high = highs[i];
            lows[i] = low * cosine[i] - high * sine[i];
            highs[i] = high * cosine[i] + low * sine[i];
        }
    }

    samovar_model has_;
    Crew crew_;
    Attention<Number, Entry> attention_;
    long q_width_, kv_width_, qkv_step_, x_step_;
    const Number* embedding_ = nullptr;  // none: the head's
    std::vector<float> frequencies_, final_norm_, cosines_, sines_;
    const std::vector<float> no_bias_;
    Shelf shelf_;
    Matrix<Number, Weight> head_;
    std::vector<Layer<Number, Weight>> layers_;
    Memory x_, qkv_, packed_, attended_, inner_;
    std::vector<Own> own_;
};

using Opened = Model<SAMOVAR_NUMBER, SAMOVAR_WEIGHT>;

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

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Returns null, or a sentence that says what is wrong.
EXPORTED const char* samovar_open(const samovar_model* given, int threads, void** opened) {
    return guarded([&] {
        *opened = new Opened(*given, threads);
    });
}

EXPORTED void samovar_close(void* opened) { delete static_cast<Opened*>(opened); }

// Returns whether steps read the embedding that was given: else it is the head, of which there is a copy.
EXPORTED int samovar_reads_embedding(void* opened) { return static_cast<Opened*>(opened)->reads_embedding(); }

EXPORTED const char* samovar_run(void* opened, const samovar_step* step) {
    return guarded([&] { static_cast<Opened*>(opened)->step(*step); });
}

// Writes the logits `[count, vocab]` of `rows` of `hidden` `[all, hidden]`.
EXPORTED const char* samovar_logits(void* opened, const float* hidden, int64_t all, const int32_t* rows, int64_t count,
                           float* out) {
    return guarded([&] { static_cast<Opened*>(opened)->logits(hidden, all, rows, count, out); });
}
