// Attention over the pool's pages: blocks of keys that begin at multiples of PANEL, an online softmax over them in
// order (Milakov and Gimelshein, arXiv 1805.02867), K and V as they are stored.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "exponential.h"
#include "weights.h"

constexpr int QUERY_ROWS = 96, QUERY_ROWS_MAX = 384;  // of an item: they share a block of keys
constexpr int ITEMS = 4;  // of a member: with fewer, some would wait for others
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

// Tokens of a segment that share blocks of keys, and the KV heads whose queries are meant. What the first token
// has seen becomes row `to`.
struct Queries {
    long segment, first, count, to, head, heads;
};

// Tokens of a segment one after the other; `to`: of the first one.
struct Run {
    long segment, first, count, to;
};

// Returns whole segments, or what is wanted of them: the rows behind each other.
inline std::vector<Run> runs_of(const samovar_step& step, bool is_part) {
    std::vector<Run> runs;
    for (long segment = 0; segment < step.segments; segment++) {
        const int32_t* span = step.spans + 4 * segment;
        if (!is_part) {
            runs.push_back({segment, 0, span[1], span[0]});
            continue;
        }
        const int32_t* end = step.wanted + step.wanted_rows;
        for (const int32_t* one = std::lower_bound(step.wanted, end, span[0]); one < end && *one < span[0] + span[1];) {
            const int32_t* next = one + 1;
            while (next < end && *next < span[0] + span[1] && *next == next[-1] + 1) next++;
            runs.push_back({segment, *one - span[0], next - one, one - step.wanted});
            one = next;
        }
    }
    return runs;
}

// `Entry`: what products are of, float or pairs; pairs need heads of an even size.
template <class Number, class Entry>
class Attention {
    static constexpr int NUMBERS = Term<Entry>::NUMBERS;

  public:
    struct Own {  // scratch of one member
        Memory query, keys, values, scores, shares, edge, heads, weight, top, shrunk;
    };

    Attention(long q_heads, long kv_heads, long head_dim)
        : group_(q_heads / kv_heads), kv_heads_(kv_heads), width_(head_dim),
          terms_(head_dim / NUMBERS), value_step_(rounded_up(head_dim, PANEL)), nothing_(head_dim, Number{}) {}

    void prepare(Own& own) const {
        long rows = std::max<long>(QUERY_ROWS_MAX, group_ * kv_heads_);
        own.query.template entries<Entry>(rows * terms_);
        own.keys.template entries<Entry>(PANEL * terms_);
        long values = PANEL / NUMBERS * value_step_;
        std::fill_n(own.values.template entries<Entry>(values), values, Entry{});
        own.scores.floats(rows * PANEL);
        own.shares.template entries<Entry>(rows * SHARES);
        own.edge.template entries<Entry>(value_step_);
        own.heads.floats(rows * value_step_);
        own.weight.floats(rows * PANEL);
        own.top.floats(rows);
        own.shrunk.floats(rows);
    }

    // Returns the items of a step for so many members, those with most keys first; `is_part`: of wanted rows.
    std::vector<Queries> queries_of(const samovar_step& step, long members, bool is_part) const {
        std::vector<Run> runs = runs_of(step, is_part);
        std::vector<Queries> queries;
        // Few tokens read each key once: all heads at a time read pages in order.
        auto is_short = [&](const Run& run) { return run.count == 1 || run.count * group_ * kv_heads_ <= QUERY_ROWS; };
        long short_ones = std::count_if(runs.begin(), runs.end(), is_short);
        // The more rows, the fewer times keys and values are laid out for them.
        long rows = 0;
        for (const Run& run : runs) rows += is_short(run) ? 0 : run.count * group_ * kv_heads_;
        long at_most = std::clamp<long>(rows / (ITEMS * members), QUERY_ROWS, QUERY_ROWS_MAX);
        long together = std::max<long>(1, at_most / group_);
        long heads_of_short = std::min(kv_heads_, (kv_heads_ * short_ones + members - 1) / members);
        for (const Run& run : runs) {
            long at_once = is_short(run) ? heads_of_short : 1;
            for (long first = 0; first < run.count; first += together)
                for (long head = 0; head < kv_heads_; head += at_once)
                    queries.push_back({run.segment, run.first + first, std::min(together, run.count - first),
                                       run.to + first, head, std::min(at_once, kv_heads_ - head)});
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
                const Rows<float>& qkv, const Rows<Entry>& attended, Own& own) const {
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
            const Found& later = turn < last ? next : here;
            Seen seen(*this, queries, position, window, block * PANEL);
            for (long i = 0; i < queries.heads; i++) {
                take_keys(here, later, shift_of(step, queries.head + i), own);
                for (long part = 0; part < parts.count; part++) score(parts, part, i * rows, seen, own);
            }
            for (long i = 0; i < queries.heads; i++) soften(i * rows + seen.low, i * rows + seen.high, own);
            for (long i = 0; i < queries.heads; i++) {
                take_values(here, later, shift_of(step, queries.head + i) + step.value_step, own);
                for (long part = 0; part < parts.count; part++) add_part(parts, part, i * rows, seen, own);
            }
        }
        finish(queries, tiles, attended, own);
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
    void begin(const Queries& queries, long first_row, const Tiles& parts, const Rows<float>& qkv,
               Own& own) const {
        const float* from[ROWS];
        for (long head = 0; head < queries.heads; head++)
            for (long part = 0; part < parts.count; part++) {
                for (int i = 0; i < parts.size(part); i++) {
                    long row = parts.begin(part) + i;
                    from[i] = qkv.entries + (first_row + row / group_) * qkv.step +
                              ((queries.head + head) * group_ + row % group_) * width_;
                }
                parts.put_all(from, parts.size(part), part, 0, 0, width_, terms_,
                              own.query.template as<Entry>() + head * parts.rows * terms_);
            }
        long rows = queries.heads * parts.rows;
        std::fill_n(own.heads.template as<float>(), rows * value_step_, 0.0f);
        std::fill_n(own.weight.template as<float>(), rows * PANEL, 0.0f);
        std::fill_n(own.top.template as<float>(), rows, NEVER);
    }

    // Ends the softmax, and packs what the heads have seen: of each the tokens that are in one tile together.
    void finish(const Queries& queries, const Tiles& tiles, const Rows<Entry>& attended, Own& own) const {
        long rows = queries.count * group_;
        float* heads = own.heads.template as<float>();
        for (long i = 0; i < queries.heads * rows; i++) {
            const float* weight = own.weight.template as<float>() + i * PANEL;
            float sum = 0.0f;
            for (int j = 0; j < PANEL; j++) sum += weight[j];
            float* from = heads + i * value_step_;
            for (long d = 0; d < width_; d++) from[d] /= sum;
        }
        const float* from[ROWS];
        for (long token = 0, end; token < queries.count; token = end) {
            long at = queries.to + token, tile = tiles.of(at);
            end = std::min(queries.count, token + tiles.begin(tile + 1) - at);
            for (long head = 0; head < queries.heads * group_; head++) {
                for (long one = token; one < end; one++)
                    from[one - token] = heads + (head / group_ * rows + one * group_ + head % group_) * value_step_;
                tiles.put_all(from, int(end - token), tile, int(at - tiles.begin(tile)),
                              (queries.head * group_ + head) * width_, width_, attended.step, attended.entries);
            }
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

    // What the rows of a KV head see of a block of keys whose first is token `first`.
    struct Seen {
        long group, position, window, first;
        long low = 0, high;  // the rows that see any of it

        Seen(const Attention& of, const Queries& queries, long position_, long window_, long first_)
            : group(of.group_), position(position_), window(window_), first(first_), high(queries.count * group) {
            while (low < high && to(low) <= 0) low++;
            while (high > low && from(high - 1) >= PANEL) high--;
        }
        long from(long row) const {
            return window ? std::max<long>(0, position + row / group - window + 1 - first) : 0;
        }
        long to(long row) const { return std::min<long>(PANEL, position + row / group + 1 - first); }
        bool is_all(long begin, long end) const { return from(end - 1) == 0 && to(begin) == PANEL; }
    };

    // Returns a head's vectors of a block, and those to fetch meanwhile; zeros from the context's end on.
    Vectors<Number> vectors(const Found& found, const Found& later, long shift) const {
        Vectors<Number> of;
        for (int j = 0; j < PANEL; j++) {
            of.here[j] = j < found.count ? found.keys[j] + shift : nothing_.data();
            of.later[j] = j < later.count ? later.keys[j] + shift : nothing_.data();
        }
        return of;
    }
    void take_keys(const Found& found, const Found& later, long shift, Own& own) const {
        transpose(vectors(found, later, shift), width_, own.keys.template as<Entry>());
    }
    void take_values(const Found& found, const Found& later, long shift, Own& own) const {
        lay_out(vectors(found, later, shift), width_, own.values.template as<Entry>(), value_step_);
    }

    // Scores a block of keys for a tile of queries; row `row` is the first of its head.
    void score(const Tiles& parts, long part, long row, const Seen& seen, Own& own) const {
        long begin = parts.begin(part), size = parts.size(part);
        long low = std::max(begin, seen.low), high = std::min(begin + size, seen.high);
        if (low >= high) return;
        float* scores = own.scores.template as<float>() + (row + low) * PANEL;
        const Entry* queries = own.query.template as<Entry>() + (row + begin) * terms_ + (low - begin);
        tile<Entry, 1, Sums::of_cache>(int(high - low), queries, size, own.keys.template as<Entry>(), 1, 0, PANEL, terms_,
                                    scores, PANEL);
        if (seen.is_all(low, high)) return;
        for (long i = low; i < high; i++, scores += PANEL) {
            for (long j = 0, end = seen.from(i); j < end; j++) scores[j] = NEVER;
            for (long j = seen.to(i); j < PANEL; j++) scores[j] = NEVER;
        }
    }

    // Adds a block of values to what a tile of queries has seen.
    void add_part(const Tiles& parts, long part, long row, const Seen& seen, Own& own) const {
        long low = std::max(parts.begin(part), seen.low), high = std::min(parts.begin(part + 1), seen.high);
        for (long i = low, end; i < high; i = end) {
            long from = seen.from(i), to = seen.to(i);
            bool is_all = seen.is_all(i, high);
            for (end = is_all ? high : i + 1; end < high && seen.from(end) == from && seen.to(end) == to;) end++;
            add_values(int(end - i), row + i, from, to, own);
        }
    }

    // Adds the values `[from, to)` of a block to the sums of rows that see just these, each times its share.
    // What a row does not see is no part of its sums: not even 0 times it.
    void add_values(int rows, long first, long from, long to, Own& own) const {
        float* heads = own.heads.template as<float>() + first * value_step_;
        const Entry* values = own.values.template as<Entry>();
        auto add = [&](const Entry* some, long begin, long end) {
            tile<Entry, SHARES, Sums::continued>(rows, shares_of(own) + first * SHARES + begin, 1, some,
                                                 int(value_step_ / PANEL), PANEL, value_step_, end - begin, heads,
                                                 value_step_);
        };
        if constexpr (NUMBERS == 1) {
            add(values + from * value_step_, from, to);
        } else {
            auto add_one_of = [&](long number, uint32_t mask) {
                pair* edge = own.edge.template as<pair>();
                for (long d = 0; d < value_step_; d++) edge[d].bits = values[number * value_step_ + d].bits & mask;
                add(edge, number, number + 1);
            };
            long begin = (from + 1) / 2, end = to / 2;
            if (from % 2) add_one_of(from / 2, 0xffff0000u);
            if (begin < end) add(values + begin * value_step_, begin, end);
            if (to % 2) add_one_of(to / 2, 0x0000ffffu);
        }
    }

    static const Entry* shares_of(const Own& own) {
        if constexpr (NUMBERS == 1) return own.scores.template as<float>();
        else return own.shares.template as<Entry>();
    }

    // Makes the scores of rows shares of their softmax so far. One kind of work for all rows, then the next: a row's
    // own are a chain that the CPU waits for.
    void soften(long begin, long end, Own& own) const {
        float* __restrict top = own.top.template as<float>();
        float* __restrict shrunk = own.shrunk.template as<float>();
        for (long i = begin; i < end; i++) shrunk[i] = largest(own.scores.template as<float>() + i * PANEL);
        for (long i = begin; i < end; i++) {
            float higher = shrunk[i] > top[i] ? shrunk[i] : top[i];
            shrunk[i] = exponential_of_none_above_zero(top[i] - higher);
            top[i] = higher;
        }
        for (long i = begin; i < end; i++) {
            float *scores = own.scores.template as<float>() + i * PANEL, some[PANEL];
            float *weight = own.weight.template as<float>() + i * PANEL, higher = top[i], factor = shrunk[i];
            for (int j = 0; j < PANEL; j++) some[j] = exponential_of_none_above_zero(scores[j] - higher);
            for (int j = 0; j < PANEL; j++) weight[j] = __builtin_fmaf(weight[j], factor, some[j]);
            if constexpr (NUMBERS == 2) pair_up(some, PANEL, own.shares.template as<pair>() + i * SHARES);
            else std::copy_n(some, PANEL, scores);
            if (factor == 1.0f) continue;
            float* head = own.heads.template as<float>() + i * value_step_;
            for (long d = 0; d < value_step_; d++) head[d] *= factor;
        }
    }

    static constexpr int SHARES = PANEL / NUMBERS;  // of a row in a block
    const long group_, kv_heads_, width_, terms_, value_step_;
    const std::vector<Number> nothing_;
};
