// Runs the native step without Python, for sanitizers: one sequence in other chunks, beside another one, on other
// numbers of threads. Ends with 1 if any bit differs.
#include <cstdio>
#include <cstring>
#include <vector>

#include "step.cpp"

namespace {

constexpr long LAYERS = 2, HIDDEN = 75, INNER = 90, VOCAB = 70, Q_HEADS = 6, KV_HEADS = 2, WIDTH = 80;
constexpr long TOKENS = 110, BLOCK = 16, PAGES = 40, QKV = (Q_HEADS + 2 * KV_HEADS) * WIDTH;
using Number = SAMOVAR_NUMBER;

uint32_t state = 1;

float drawn() {
    state = state * 1664525u + 1013904223u;
    return float(int(state >> 16) - 32768) / 65536.0f;
}

// Exactly as long as it says: what is read behind the end is seen.
std::vector<Number> weights(long count, float around = 0.0f) {
    std::vector<Number> numbers(count);
    for (Number& one : numbers) narrow(around + drawn() * 0.2f, one);
    return numbers;
}

struct Given {
    std::vector<std::vector<Number>> held;
    std::vector<float> frequencies;
    std::vector<samovar_layer> layers;
    samovar_model model{};

    const void* hold(std::vector<Number> numbers) {
        held.push_back(std::move(numbers));
        return held.back().data();
    }
};

void describe(Given& given) {
    for (long i = 0; i < WIDTH / 2; i++) given.frequencies.push_back(1.0f / float(1 + i));
    for (long i = 0; i < LAYERS; i++)
        given.layers.push_back({given.hold(weights(HIDDEN, 1)), given.hold(weights(QKV * HIDDEN)),
                                i ? given.hold(weights(QKV)) : nullptr, i ? given.hold(weights(WIDTH, 1)) : nullptr,
                                i ? given.hold(weights(WIDTH, 1)) : nullptr,
                                given.hold(weights(HIDDEN * Q_HEADS * WIDTH)),
                                i ? given.hold(weights(HIDDEN)) : nullptr, given.hold(weights(HIDDEN, 1)),
                                given.hold(weights(2 * INNER * HIDDEN)), given.hold(weights(HIDDEN * INNER)), 1,
                                i ? 37 : 0});
    given.model = {LAYERS, HIDDEN, INNER, VOCAB, Q_HEADS, KV_HEADS, WIDTH, 1e-5f, 0.11f, 1.0f, 1.0f, 1.0f, 2.0f,
                   given.layers.data(), given.hold(weights(VOCAB * HIDDEN, 0.1f)), given.hold(weights(HIDDEN, 1)),
                   given.hold(weights(VOCAB * HIDDEN)), given.frequencies.data()};
}

void insist(const char* problem) {
    if (problem == nullptr) return;
    std::fprintf(stderr, "%s\n", problem);
    std::exit(1);
}

// Returns the logits of the last token, behind K and V of all of them.
std::vector<float> computed(void* opened, const std::vector<int>& chunks, bool has_company) {
    std::vector<Number> pool(PAGES * LAYERS * 2 * BLOCK * KV_HEADS * WIDTH);
    std::memset(pool.data(), 0xff, pool.size() * sizeof(Number));  // NaN
    std::vector<int32_t> pages, company{1, 2};
    for (long i = 0; i < (TOKENS + BLOCK - 1) / BLOCK; i++) pages.push_back(int32_t(PAGES - 1 - 3 * i));
    std::vector<float> hidden, logits(VOCAB);
    int start = 0;
    for (int count : chunks) {
        std::vector<int32_t> ids, positions, slots, spans, tables(pages);
        if (has_company) {  // one more token of another sequence, in front
            ids.push_back(3), positions.push_back(start), slots.push_back(company[start / BLOCK % 2] * BLOCK);
            spans = {0, 1, 1, int32_t(tables.size())};
            tables.insert(tables.end(), company.begin(), company.end());
        }
        spans.insert(spans.end(), {int32_t(ids.size()), count, start + count, 0});
        for (int i = start; i < start + count; i++) {
            ids.push_back(i * 7 % VOCAB), positions.push_back(i);
            slots.push_back(int32_t(pages[i / BLOCK] * BLOCK + i % BLOCK));
        }
        long rows = long(ids.size());
        hidden.assign(rows * HIDDEN, 0.0f);
        bool is_over = start + count == TOKENS;
        std::vector<int32_t> wanted;  // with company only what is looked at, of exactly its size
        if (is_over) wanted.push_back(int32_t(rows - 1));
        samovar_step step{rows, long(spans.size()) / 4, long(tables.size()),
                          has_company ? long(wanted.size()) : -1, ids.data(), positions.data(), slots.data(),
                          spans.data(), tables.data(), wanted.data(), pool.data(), PAGES, BLOCK, KV_HEADS,
                          LAYERS * 2 * BLOCK * KV_HEADS * WIDTH, 0, 2 * BLOCK * KV_HEADS * WIDTH,
                          BLOCK * KV_HEADS * WIDTH, KV_HEADS * WIDTH, WIDTH, hidden.data()};
        insist(samovar_run(opened, &step));
        int32_t last = int32_t(rows - 1);
        if (is_over) insist(samovar_logits(opened, hidden.data(), rows, &last, 1, logits.data()));
        start += count;
    }
    for (int32_t page : pages)
        for (long i = 0, all = LAYERS * 2 * BLOCK * KV_HEADS * WIDTH; i < all; i++) {
            long slot = i / (KV_HEADS * WIDTH) % BLOCK;
            if (page != pages.back() || slot < TOKENS % BLOCK) logits.push_back(widened(pool[page * all + i]));
        }
    return logits;
}

}  // namespace

int main() {
    Given given;
    describe(given);
    std::vector<float> truth;
    for (int threads : {1, 2, 4, 1}) {
        if (threads == 1 && !truth.empty()) {  // once more, with a head that is the embedding
            given.model.head = given.model.embedding;
            truth.clear();
        }
        void* opened = nullptr;
        insist(samovar_open(&given.model, threads, &opened));
        std::vector<std::vector<int>> chunkings{{TOKENS}, {37, 13, 60}, {100, 1, 1, 1, 1, 1, 5}};
        for (const std::vector<int>& chunks : chunkings)
            for (bool has_company : {false, true}) {
                std::vector<float> found = computed(opened, chunks, has_company);
                if (truth.empty()) truth = found;
                if (std::memcmp(truth.data(), found.data(), truth.size() * sizeof(float)) != 0) {
                    std::fprintf(stderr, "other bits with %d threads\n", threads);
                    return 1;
                }
            }
        samovar_close(opened);
    }
    std::puts("the same");
    return 0;
}
