// Compares this CPU's dot products of bf16 with their emulation, bit by bit. Ends with 1 if they differ.
#include <cstdio>

#include "kernels.h"

namespace {

// Zeros, denormal numbers, the least and the largest normal ones, infinities, NaN: the upper halves of floats.
constexpr uint32_t SPECIAL[] = {0x0000, 0x8000, 0x0001, 0x807f, 0x0080, 0x8080, 0x3f80, 0xbf81,
                                0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7fc0, 0xffa1, 0x2000, 0xa001};

bool same(float one, float other) { return bits_of(one) == bits_of(other) || (one != one && other != other); }

bool special_ones_are_right() {
    for (uint32_t x_low : SPECIAL)
        for (uint32_t x_high : SPECIAL)
            for (uint32_t y_low : SPECIAL)
                for (uint32_t y_high : SPECIAL)
                    for (uint32_t sum : SPECIAL) {
                        pair x{x_low | x_high << 16}, y{y_low | y_high << 16};
                        float from = from_bits(sum << 16 | (x_low & 1u)), found[W], truth = dot_of(x, y, from);
                        store(found, dot(spread(x), spread(y), spread(from)));
                        if (same(found[0], truth)) continue;
                        std::printf("%08x . %08x + %08x: %08x, not %08x\n", x.bits, y.bits, bits_of(from),
                                    bits_of(found[0]), bits_of(truth));
                        return false;
                    }
    return true;
}

// Sums from just below the least normal number to just above: what is rounded up to it, and what is zero.
bool least_ones_are_right() {
    for (uint32_t number = 0; number < 4u << 20; number++) {
        pair x{0x20002000u | (number & 0x7fu)}, y{0x1f001f00u | (number >> 7 & 0x7fu) << 16 | (number & 0x8000u)};
        float from = from_bits(0x00800000u + (number >> 16)), found[W];
        if (number & 1u << 14) from = -from;
        store(found, dot(spread(x), spread(y), spread(from)));
        if (!same(found[0], dot_of(x, y, from))) return false;
    }
    return true;
}

}  // namespace

int main() {
    bool are_right = special_ones_are_right() && least_ones_are_right() && dots_are_right(200000);
    std::puts(are_right ? "the same" : "others");
    return !are_right;
}
