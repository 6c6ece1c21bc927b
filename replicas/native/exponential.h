// The exponential function, of one number: within 2 units in the last place, the same bits on every machine.
#pragma once

#include "kernels.h"

// e to the x for x in [-87, 88]; what it returns elsewhere means nothing. NaN stays NaN.
INLINE float exponential_within(float x) {
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer in the last bits
    float shifted = __builtin_fmaf(x, 1.44269504088896341f, ROUND);
    float n = shifted - ROUND;
    float r = __builtin_fmaf(n, -0.693359375f, x);
    r = __builtin_fmaf(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = __builtin_fmaf(p, r, 1.3981999507e-3f);
    p = __builtin_fmaf(p, r, 8.3334519073e-3f);
    p = __builtin_fmaf(p, r, 4.1665795894e-2f);
    p = __builtin_fmaf(p, r, 1.6666665459e-1f);
    p = __builtin_fmaf(p, r, 5.0000001201e-1f);
    p = __builtin_fmaf(p, r * r, r) + 1.0f;
    float power = from_bits((bits_of(shifted) + 127u) << 23);
    return p * power;
}

// e to the x for x <= 0; 0 below -87, where that is no longer normal. NaN stays NaN.
INLINE float exponential_of_none_above_zero(float x) {
    float found = exponential_within(x);
    return x < -87.0f ? 0.0f : found;
}

// e to the x; 0 below -87, and above 88 what it is there. NaN stays NaN.
INLINE float exponential(float x) {
    float z = x < -87.0f ? -87.0f : x;
    float found = exponential_within(z > 88.0f ? 88.0f : z);
    return x < -87.0f ? 0.0f : found;
}
