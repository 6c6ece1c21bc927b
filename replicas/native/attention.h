// Attention over the pool's pages: blocks of keys that begin at multiples of PANEL, an online softmax over them in
// order (Milakov and Gimelshein, arXiv 1805.02867), K and V as they are stored.
#pragma once

#include <limits>
#include <vector>

#include "weights.h"

constexpr int QUERY_ROWS = 48;  // of an item: they share a block of keys
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// Where K of a head in a slot of a page lies; V is `value_step` behind it.
template <class Number>
INLINE Number* place(const samovar_step& step, long layer, long page, long slot, long head) {
    return static_cast<Number*>(step.pool) + page * step.page_step +
           head / step.heads_per_group * step.group_step + layer * step.layer_step + slot * step.slot_step +
           head % step.heads_per_group * step.head_step;
}

// Tokens of a segment that share blocks of keys.
struct Queries {
    long segment, first, count;
};

template <class Number>
class Attention {
  public:
    struct Own {  // scratch of one member
        Memory query, keys, values, scores, heads, weight, top;
    };

    Attention(long q_heads, long kv_heads, long head_dim)
        : group_(q_heads / kv_heads), width_(head_dim), value_step_(rounded_up(head_dim, PANEL)),
          nothing_(head_dim, Number{}) {}

    void prepare(Own& own) const {
        long rows = std::max<long>(QUERY_ROWS, group_);
        own.query.floats(rows * width_);
        own.keys.floats(PANEL * width_);
        std::fill_n(own.values.floats(PANEL * value_step_), PANEL * value_step_, 0.0f);
        own.scores.floats(ROWS * PANEL);
        own.heads.floats(rows * value_step_);
        own.weight.floats(rows * PANEL);
        own.top.floats(rows);
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

    // Attends for the query heads of one KV head, from `qkv` to the packed rows `attended`.
    void attend(const samovar_step& step, long layer, long window, const Queries& queries, long head,
                const Tiles& tiles, const Rows& qkv, const Rows& attended, Own& own) const {
        const int32_t* span = step.spans + 4 * queries.segment;
        long rows = queries.count * group_, row_of_first = span[0] + queries.first;
        long position = span[2] - span[1] + queries.first;  // of the first token
        float *query = own.query.template as<float>(), *heads = own.heads.template as<float>();
        float *weight = own.weight.template as<float>(), *top = own.top.template as<float>();
        Tiles parts(rows);
        for (long part = 0; part < parts.count; part++)
            for (int i = 0; i < parts.size(part); i++) {
                long row = parts.begin(part) + i;
                const float* from = qkv.numbers + (row_of_first + row / group_) * qkv.step;
                parts.put(from + (head * group_ + row % group_) * width_, part, i, width_, query);
            }
        std::fill_n(heads, rows * value_step_, 0.0f);
        std::fill_n(weight, rows * PANEL, 0.0f);
        std::fill_n(top, rows, NEVER);
        long first = window ? std::max<long>(0, position - window + 1) / PANEL : 0;
        long last = (position + queries.count - 1) / PANEL;
        Found found[2];
        find(step, layer, span, in_order(first, first, last, queries.count), head, found[0]);
        for (long turn = first; turn <= last; turn++) {
            const Found &here = found[(turn - first) % 2], &next = found[(turn - first + 1) % 2];
            if (turn < last) {
                find(step, layer, span, in_order(turn + 1, first, last, queries.count), head,
                     found[(turn - first + 1) % 2]);
                fetch(next);
            }
            transpose(here.keys, width_, own.keys.template as<float>());
            for (int j = 0; j < PANEL; j++)
                widen_run(here.values[j], own.values.template as<float>() + j * value_step_, width_);
            long block = in_order(turn, first, last, queries.count);
            for (long part = 0; part < parts.count; part++)
                attend_part(parts, part, position, window, block * PANEL, own);
        }
        for (long row = 0; row < rows; row++) {
            float sum = 0.0f;
            for (int j = 0; j < PANEL; j++) sum += weight[row * PANEL + j];
            float* from = heads + row * value_step_;
            for (long d = 0; d < width_; d++) from[d] /= sum;
            long at = row_of_first + row / group_, tile = tiles.of(at), size = tiles.size(tile);
            float* to = attended.numbers + tiles.begin(tile) * attended.step + at - tiles.begin(tile);
            to += (head * group_ + row % group_) * width_ * size;
            for (long d = 0; d < width_; d++) to[d * size] = from[d];
        }
    }

  private:
    struct Found {  // K and V of a block of keys
        const Number *keys[PANEL], *values[PANEL];
    };

    static long in_order(long turn, long first, long last, long count) {
#if SAMOVAR_FAULT == 2
        if (count > 1 && last > first + 1 && turn <= first + 1) return 2 * first + 1 - turn;
#else
        (void)first, (void)last, (void)count;
#endif
        return turn;
    }

    // Finds K of a block, and V behind it; zeros from the context's end on.
    void find(const samovar_step& step, long layer, const int32_t* span, long block, long head, Found& found) const {
        long first = block * PANEL, page = first / step.block_tokens, slot = first % step.block_tokens;
        const Number* from = nullptr;
        for (int j = 0; j < PANEL; j++) {
            if (first + j >= span[2]) {
                found.keys[j] = found.values[j] = nothing_.data();
                continue;
            }
            if (from == nullptr) from = place<Number>(step, layer, step.tables[span[3] + page], slot, head);
            found.keys[j] = from;
            found.values[j] = from + step.value_step;
            from += step.slot_step;
            if (++slot == step.block_tokens) slot = 0, page++, from = nullptr;
        }
    }

    // Has a block brought to the cache while another is computed: its pages lie anywhere.
    void fetch(const Found& found) const {
        constexpr long LINE = 64 / sizeof(Number);
        for (int j = 0; j < PANEL; j++)
            for (long d = 0; d < width_; d += LINE) {
                __builtin_prefetch(found.keys[j] + d);
                __builtin_prefetch(found.values[j] + d);
            }
    }

    // Attends of a tile of queries to a block of keys, whose first is token `first`.
    void attend_part(const Tiles& parts, long part, long position, long window, long first, Own& own) const {
        long begin = parts.begin(part), size = parts.size(part);
        float *scores = own.scores.template as<float>(), *values = own.values.template as<float>();
        float* heads = own.heads.template as<float>() + begin * value_step_;
        auto seen_from = [&](long i) {
            long token = position + (begin + i) / group_;
            return window ? std::max<long>(0, token - window + 1 - first) : 0;
        };
        auto seen_to = [&](long i) { return std::min<long>(PANEL, position + (begin + i) / group_ + 1 - first); };
        long low = 0, high = size;  // the rows that see any of it
        while (low < high && seen_to(low) <= 0) low++;
        while (high > low && seen_from(high - 1) >= PANEL) high--;
        if (low == high) return;
        tile<float, 1, Sums::fresh>(int(high - low), own.query.template as<float>() + begin * width_ + low, size,
                                    own.keys.template as<float>(), 1, 0, PANEL, width_, scores, PANEL);
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

    const long group_, width_, value_step_;
    const std::vector<Number> nothing_;
};
