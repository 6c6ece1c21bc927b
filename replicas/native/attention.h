// Attention over the pool's pages: blocks of keys that begin at multiples of PANEL, an online softmax over them in
// order (Milakov and Gimelshein, arXiv 1805.02867), K and V as they are stored.
#pragma once

#include <limits>
#include <vector>

#include "weights.h"

constexpr int QUERY_ROWS = 48;  // of an item: they share a block of keys
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// Where K of head 0 in a slot of a page lies; V is `value_step` behind it.
template <class Number>
INLINE Number* place(const samovar_step& step, long layer, long page, long slot) {
    return static_cast<Number*>(step.pool) + page * step.page_step + layer * step.layer_step + slot * step.slot_step;
}

// Where a head's numbers lie behind those of head 0.
INLINE long shift_of(const samovar_step& step, long head) {
    return head / step.heads_per_group * step.group_step + head % step.heads_per_group * step.head_step;
}

// Tokens of a segment that share blocks of keys, and the KV heads whose queries are meant.
struct Queries {
    long segment, first, count, head, heads;
};

template <class Number>
class Attention {
  public:
    struct Own {  // scratch of one member
        Memory query, keys, values, scores, heads, weight, top;
    };

    Attention(long q_heads, long kv_heads, long head_dim)
        : group_(q_heads / kv_heads), kv_heads_(kv_heads), width_(head_dim),
          value_step_(rounded_up(head_dim, PANEL)), nothing_(head_dim, Number{}) {}

    void prepare(Own& own) const {
        long rows = std::max<long>(QUERY_ROWS, group_ * kv_heads_);
        own.query.floats(rows * width_);
        own.keys.floats(PANEL * width_);
        std::fill_n(own.values.floats(PANEL * value_step_), PANEL * value_step_, 0.0f);
        own.scores.floats(ROWS * PANEL);
        own.heads.floats(rows * value_step_);
        own.weight.floats(rows * PANEL);
        own.top.floats(rows);
    }

    // Returns the items of a step for so many members, those with most keys first.
    std::vector<Queries> queries_of(const samovar_step& step, long members) const {
        std::vector<Queries> queries;
        long together = std::max<long>(1, QUERY_ROWS / group_), decodes = 0;
        for (long segment = 0; segment < step.segments; segment++) decodes += step.spans[4 * segment + 1] == 1;
        // One token reads a key once: all heads at a time read pages in order.
        long heads_of_one = std::min(kv_heads_, std::max<long>(1, kv_heads_ * decodes / members));
        for (long segment = 0; segment < step.segments; segment++) {
            long count = step.spans[4 * segment + 1], at_once = count == 1 ? heads_of_one : 1;
            for (long first = 0; first < count; first += together)
                for (long head = 0; head < kv_heads_; head += at_once)
                    queries.push_back({segment, first, std::min(together, count - first), head,
                                       std::min(at_once, kv_heads_ - head)});
        }
        auto keys = [&](const Queries& one) {
            const int32_t* span = step.spans + 4 * one.segment;
            return span[2] - span[1] + one.first + one.count;
        };
        std::stable_sort(queries.begin(), queries.end(),
                         [&](const Queries& a, const Queries& b) { return keys(a) > keys(b); });
        return queries;
    }

    // Attends for an item, from `qkv` to the packed rows `attended`.
    void attend(const samovar_step& step, long layer, long window, const Queries& queries, const Tiles& tiles,
                const Rows& qkv, const Rows& attended, Own& own) const {
        const int32_t* span = step.spans + 4 * queries.segment;
        long rows = queries.count * group_;  // of one KV head; those of the next follow
        long position = span[2] - span[1] + queries.first;  // of the first token
        Tiles parts(rows);
        begin(queries, span[0] + queries.first, parts, qkv, own);
        long first = window ? std::max<long>(0, position - window + 1) / PANEL : 0;
        long last = (position + queries.count - 1) / PANEL;
        Found found[2];
        find(step, layer, span, in_order(first, first, last, queries.count), found[0]);
        for (long turn = first; turn <= last; turn++) {
            const Found &here = found[(turn - first) % 2], &next = found[(turn - first + 1) % 2];
            if (turn < last)
                find(step, layer, span, in_order(turn + 1, first, last, queries.count),
                     found[(turn - first + 1) % 2]);
            long block = in_order(turn, first, last, queries.count);
            for (long i = 0; i < queries.heads; i++) {
                long shift = shift_of(step, queries.head + i);
                if (turn < last) fetch(next, shift, step.value_step);
                take(here, shift, step.value_step, own);
                for (long part = 0; part < parts.count; part++)
                    attend_part(parts, part, i * rows, position, window, block * PANEL, own);
            }
        }
        finish(queries, span[0] + queries.first, tiles, attended, own);
    }

  private:
    struct Found {  // K of head 0 of a block of keys, as far as the context goes
        const Number* keys[PANEL];
        int count;
    };

    static long in_order(long turn, long first, long last, long count) {
#if SAMOVAR_FAULT == 2
        if (count > 1 && last > first + 1 && turn <= first + 1) return 2 * first + 1 - turn;
#else
        (void)first, (void)last, (void)count;
#endif
        return turn;
    }

    // Packs the queries, and begins their softmax.
    void begin(const Queries& queries, long first_row, const Tiles& parts, const Rows& qkv, Own& own) const {
        for (long head = 0; head < queries.heads; head++)
            for (long part = 0; part < parts.count; part++)
                for (int i = 0; i < parts.size(part); i++) {
                    long row = parts.begin(part) + i;
                    const float* from = qkv.numbers + (first_row + row / group_) * qkv.step;
                    parts.put(from + ((queries.head + head) * group_ + row % group_) * width_, part, i, width_,
                              own.query.template as<float>() + head * parts.rows * width_);
                }
        long rows = queries.heads * parts.rows;
        std::fill_n(own.heads.template as<float>(), rows * value_step_, 0.0f);
        std::fill_n(own.weight.template as<float>(), rows * PANEL, 0.0f);
        std::fill_n(own.top.template as<float>(), rows, NEVER);
    }

    // Ends the softmax, and packs what the heads have seen.
    void finish(const Queries& queries, long first_row, const Tiles& tiles, const Rows& attended, Own& own) const {
        long rows = queries.count * group_;
        for (long i = 0; i < queries.heads * rows; i++) {
            const float* weight = own.weight.template as<float>() + i * PANEL;
            float sum = 0.0f;
            for (int j = 0; j < PANEL; j++) sum += weight[j];
            float* from = own.heads.template as<float>() + i * value_step_;
            for (long d = 0; d < width_; d++) from[d] /= sum;
            long head = (queries.head + i / rows) * group_ + i % rows % group_;
            long at = first_row + i % rows / group_, tile = tiles.of(at), size = tiles.size(tile);
            float* to = attended.numbers + tiles.begin(tile) * attended.step + at - tiles.begin(tile);
            to += head * width_ * size;
            for (long d = 0; d < width_; d++) to[d * size] = from[d];
        }
    }

    // Finds a block of keys, as far as the context goes.
    void find(const samovar_step& step, long layer, const int32_t* span, long block, Found& found) const {
        long first = block * PANEL, page = first / step.block_tokens, slot = first % step.block_tokens;
        const Number* from = nullptr;
        found.count = int(std::min<long>(PANEL, span[2] - first));
        for (int j = 0; j < found.count; j++) {
            if (from == nullptr) from = place<Number>(step, layer, step.tables[span[3] + page], slot);
            found.keys[j] = from;
            from += step.slot_step;
            if (++slot == step.block_tokens) slot = 0, page++, from = nullptr;
        }
    }

    // Has a head's keys brought to the cache while others are computed: their pages lie anywhere.
    void fetch(const Found& found, long shift, long value_step) const {
        constexpr long LINE = 64 / sizeof(Number);
        for (int j = 0; j < found.count; j++)
            for (long d = shift; d < shift + width_; d += LINE) {
                __builtin_prefetch(found.keys[j] + d);
                __builtin_prefetch(found.keys[j] + value_step + d);
            }
    }

    // Transposes a head's keys and widens its values; zeros from the context's end on.
    void take(const Found& found, long shift, long value_step, Own& own) const {
        const Number* keys[PANEL];
        for (int j = 0; j < PANEL; j++) keys[j] = j < found.count ? found.keys[j] + shift : nothing_.data();
        transpose(keys, width_, own.keys.template as<float>());
        float* values = own.values.template as<float>();
        for (int j = 0; j < PANEL; j++)
            widen_run(j < found.count ? keys[j] + value_step : nothing_.data(), values + j * value_step_, width_);
    }

    // Attends of a tile of queries, the rows of its head from `row` on, to keys whose first is token `first`.
    void attend_part(const Tiles& parts, long part, long row, long position, long window, long first,
                     Own& own) const {
        long begin = parts.begin(part), size = parts.size(part);
        float *scores = own.scores.template as<float>(), *values = own.values.template as<float>();
        float* heads = own.heads.template as<float>() + (row + begin) * value_step_;
        auto seen_from = [&](long i) {
            long token = position + (begin + i) / group_;
            return window ? std::max<long>(0, token - window + 1 - first) : 0;
        };
        auto seen_to = [&](long i) { return std::min<long>(PANEL, position + (begin + i) / group_ + 1 - first); };
        long low = 0, high = size;  // the rows that see any of it
        while (low < high && seen_to(low) <= 0) low++;
        while (high > low && seen_from(high - 1) >= PANEL) high--;
        if (low == high) return;
        tile<float, 1, Sums::fresh>(int(high - low), own.query.template as<float>() + (row + begin) * width_ + low, size,
                                    own.keys.template as<float>(), 1, 0, PANEL, width_, scores, PANEL);
        for (long i = low; i < high; i++)
            soften(scores + (i - low) * PANEL, seen_from(i), seen_to(i), row + begin + i, heads + i * value_step_, own);
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

    const long group_, kv_heads_, width_, value_step_;
    const std::vector<Number> nothing_;
};
