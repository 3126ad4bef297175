// Products of weights in Q4_K, Q5_K and Q6_K with rows in Q8_K, as products.h has them of smaller blocks: a lane is a weight row,
// and what is added up is the same however many rows there are. A block has 256 numbers, in parts whose scales are whole
// numbers: all of it is added up in whole numbers, in any order, and rounds when the block is done. 16 bits hold the sum of
// a part: of Q6_K only what is left of it in the end, since it begins with what the weights' offset of 32 takes away; on the
// way it may overflow and come back.
#pragma once
#include "products.h"

#if defined(DISCO_MULTIPLIES)
#if defined(__AVX512F__) && defined(__AVX512BW__)
static constexpr int DISCO_K_COLUMNS = 8; // as registers allow
static inline disco_ints disco_either(disco_ints a, disco_ints b) { return _mm512_or_si512(a, b); }
static inline disco_ints disco_right(disco_ints a, int n) { return _mm512_srli_epi32(a, n); }
static inline disco_ints disco_multiply_pairs(disco_ints a, disco_ints b) { return _mm512_madd_epi16(a, b); }
// Four bytes of each lane's, which `bytes` names in turn; 0 for 0x80.
static inline disco_ints disco_chosen(disco_ints from, int32_t bytes) {
    const __m512i lanes = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0C0C0C0C));
    return _mm512_shuffle_epi8(from, _mm512_or_si512(lanes, _mm512_set1_epi32(bytes)));
}
// What dots are multiplied with, for each lane a byte with a sign, and that product.
#if defined(DISCO_DOT)
static inline disco_ints disco_factor(disco_ints from, int byte) {
    return _mm512_srai_epi32(disco_chosen(from, (int32_t) (0x00808080u | (uint32_t) byte << 24)), 24);
}
static inline disco_ints disco_scaled(disco_ints dots, disco_ints factor) { return _mm512_mullo_epi32(dots, factor); }
#else
static inline disco_ints disco_factor(disco_ints from, int byte) {
    return _mm512_srai_epi16(disco_chosen(from, (int32_t) (0x00800080u | (uint32_t) byte * 0x01000100u)), 8);
}
#endif
#else
static constexpr int DISCO_K_COLUMNS = 4;
static inline disco_ints disco_either(disco_ints a, disco_ints b) { return _mm256_or_si256(a, b); }
static inline disco_ints disco_right(disco_ints a, int n) { return _mm256_srli_epi32(a, n); }
static inline disco_ints disco_multiply_pairs(disco_ints a, disco_ints b) { return _mm256_madd_epi16(a, b); }
static inline disco_ints disco_chosen(disco_ints from, int32_t bytes) {
    const __m256i lanes = _mm256_broadcastsi128_si256(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0C0C0C0C));
    return _mm256_shuffle_epi8(from, _mm256_or_si256(lanes, _mm256_set1_epi32(bytes)));
}
#if defined(DISCO_DOT)
static inline disco_ints disco_factor(disco_ints from, int byte) {
    return _mm256_srai_epi32(disco_chosen(from, (int32_t) (0x00808080u | (uint32_t) byte << 24)), 24);
}
static inline disco_ints disco_scaled(disco_ints dots, disco_ints factor) { return _mm256_mullo_epi32(dots, factor); }
#else
static inline disco_ints disco_factor(disco_ints from, int byte) {
    return _mm256_srai_epi16(disco_chosen(from, (int32_t) (0x00800080u | (uint32_t) byte * 0x01000100u)), 8);
}
#endif
#endif
#if !defined(DISCO_DOT)
static inline disco_ints disco_scaled(disco_ints dots, disco_ints factor) { return disco_multiply_pairs(dots, factor); }
#endif

#if defined(DISCO_K_ALONG)
// By 256 bits at a time: of 512 that are not aligned each touches two lines, and an AMD Zen 4 waits for both.
static inline __m256i disco_load(const char * from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)); }
static inline __m256i disco_either_of(__m256i a, __m256i b, __m256i mask) { return _mm256_ternarylogic_epi64(a, b, mask, 0xF8); } // a | (b & mask)
// Adds to `sums` the dot products of four numbers each, 16 bits with a sign, times what is in the lower 16 bits of `factors`.
static inline __m256i disco_add_scaled(__m256i sums, __m256i weights, __m256i row, __m256i factors) {
    return _mm256_dpwssd_epi32(sums, _mm256_dpbusd_epi32(_mm256_setzero_si256(), weights, row), factors);
}
static inline __m128i disco_add_up_four(const __m128i * rows) {
    const __m128i a = _mm_add_epi32(_mm_unpacklo_epi32(rows[0], rows[1]), _mm_unpackhi_epi32(rows[0], rows[1]));
    const __m128i b = _mm_add_epi32(_mm_unpacklo_epi32(rows[2], rows[3]), _mm_unpackhi_epi32(rows[2], rows[3]));
    return _mm_add_epi32(_mm_unpacklo_epi64(a, b), _mm_unpackhi_epi64(a, b));
}
// The sum of the lanes of each of 16 registers.
static inline __m512i disco_add_up(const __m128i * rows) {
    __m512i found = _mm512_castsi128_si512(disco_add_up_four(rows));
    found = _mm512_inserti32x4(found, disco_add_up_four(rows + 4), 1);
    found = _mm512_inserti32x4(found, disco_add_up_four(rows + 8), 2);
    return _mm512_inserti32x4(found, disco_add_up_four(rows + 12), 3);
}
// What a block of each weight row comes to with a single row, not yet added up, and what scales it.
struct disco_along_sums {
    __m128i whole[16];
    alignas(32) uint16_t scales[16];
    void set(int row, __m256i sums) {
        whole[row] = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    }
};
#endif

// A block of a tile's weight rows: four numbers of each row in a register, from 0 on; what scales each part; what is least in
// each, two parts in a register.
template <typename W>
struct disco_k_tile {
    disco_ints weights[64], factors[W::PARTS], leasts[4];
    disco_reals scale, least;
};

// The rows: of a block, scale as F32, 256 bytes with a sign, and the sums of each 16 of them in 16 bits.
struct disco_q8_k {
    static constexpr bool IS_K = true, ALONG = false;
    static constexpr int64_t ROW_BYTES = 292, ROW_AT = 4, SUMS_AT = 260, TOGETHER = 1, WORDS_OF_ROW = 64;
    static constexpr int64_t AT_ONCE = 1, COLUMNS = DISCO_K_COLUMNS;
    static inline int32_t sum(const char * block, int i) {
        int16_t found;
        std::memcpy(&found, block + SUMS_AT + 2*i, sizeof found);
        return found;
    }
};

// What Q4_K and Q5_K begin with: scale and scale of the leasts as F16, and 6 bits each of eight scales and eight leasts.
struct disco_k_leasts : disco_q8_k {
    static constexpr bool HAS_LEAST = true;
    static constexpr int64_t FIRST = 5, SCALES = FIRST + WORDS_OF_ROW;

    template <int SAME, typename Tile> // parts that have one scale
    static inline void factors_of(const char * const * rows, int64_t at, Tile & to) {
        const disco_ints low = disco_bytes(0x3F3F3F3F), nibble = disco_bytes(0x0F0F0F0F), high = disco_bytes(0x30303030);
        disco_ints words[4];
        disco_turn_words(rows, at, words);
        disco_halves(words[0], to.scale, to.least);
        const disco_ints scales[2] = {disco_both(words[1], low), disco_either(disco_both(words[3], nibble),
                                                                              disco_both(disco_right(words[1], 2), high))};
        const disco_ints leasts[2] = {disco_both(words[2], low), disco_either(disco_both(disco_right(words[3], 4), nibble),
                                                                              disco_both(disco_right(words[2], 2), high))};
        for (int i = 0; i < 8*SAME; ++i) {
            to.factors[i] = disco_factor(scales[i/SAME/4], i/SAME % 4);
        }
        for (int i = 0; i < 4; ++i) {
            to.leasts[i] = disco_chosen(leasts[i/2], (int32_t) (i % 2 ? 0x80038002u : 0x80018000u));
        }
    }

    // A row's block: its scale, and the sums of each two times 32 numbers.
    static inline void scales(const char * block, float * to) {
        std::memcpy(to, block, sizeof *to);
        for (int i = 0; i < 4; ++i) {
            const int32_t both = disco_pair(sum(block, 4*i) + sum(block, 4*i + 1), sum(block, 4*i + 2) + sum(block, 4*i + 3));
            std::memcpy(to + 1 + i, &both, sizeof both);
        }
    }
    static inline disco_ints start(const float *) { return disco_none(); }
};

// And 256 times 4 bits.
struct disco_q4_k : disco_k_leasts {
    static constexpr int64_t BYTES = 144;
    static constexpr int PARTS = 8, WORDS = 8; // words of a part
    template <typename Tile>
    static inline void factors(const char * const * rows, int64_t at, Tile & to) { factors_of<1>(rows, at, to); }

    // Gives `take` the words of each part.
    template <typename F>
    static inline void lay_out(const char * const * rows, int64_t at, F take) {
        const disco_ints nibble = disco_bytes(0x0F0F0F0F);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            disco_ints words[8], part[8];
            disco_turn_words(rows, at + 16 + 32*j, words);
            disco_turn_words(rows, at + 32 + 32*j, words + 4);
            for (int i = 0; i < 8; ++i) {
                part[i] = disco_both(words[i], nibble);
            }
            take(2*j, part);
            for (int i = 0; i < 8; ++i) {
                part[i] = disco_both(disco_right(words[i], 4), nibble);
            }
            take(2*j + 1, part);
        }
    }
};

// And a fifth bit of each, then 256 times 4 bits. With 5 bits a sum of 16 numbers is within 16 bits: of 32 it is not.
struct disco_q5_k : disco_k_leasts {
    static constexpr int64_t BYTES = 176;
    static constexpr int PARTS = 16, WORDS = 4;
    template <typename Tile>
    static inline void factors(const char * const * rows, int64_t at, Tile & to) { factors_of<2>(rows, at, to); }

    template <typename F>
    static inline void lay_out(const char * const * rows, int64_t at, F take) {
        const disco_ints nibble = disco_bytes(0x0F0F0F0F), fifth = disco_bytes(0x10101010);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            disco_ints high[4], words[4], part[4];
            disco_turn_words(rows, at + 16 + 16*half, high);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                disco_turn_words(rows, at + 48 + 32*j + 16*half, words);
#pragma GCC unroll 2
                for (int n = 2*j; n < 2*j + 2; ++n) {
                    for (int i = 0; i < 4; ++i) {
                        const disco_ints bit = n < 4 ? disco_left(high[i], 4 - n) : disco_right(high[i], n - 4);
                        part[i] = disco_either(
                            disco_both(disco_right(words[i], 4*(n % 2)), nibble), disco_both(bit, fifth));
                    }
                    take(2*n + half, part);
                }
            }
        }
    }
};

// Of a block, 256 times 4 lower bits, 256 times 2 upper bits, 16 scales with a sign, and their scale as F16. To the weights 32 is
// added, and 32 times the row's sum is taken off in advance.
struct disco_q6_k : disco_q8_k {
    static constexpr bool HAS_LEAST = false;
    static constexpr int64_t BYTES = 210, FIRST = 17, SCALES = FIRST + WORDS_OF_ROW;
    static constexpr int PARTS = 16, WORDS = 4;

    template <typename Tile>
    static inline void factors(const char * const * rows, int64_t at, Tile & to) {
        disco_ints words[4];
        disco_turn_words(rows, at + 192, words);
        to.scale = disco_halves_at(rows, at + 208);
        for (int i = 0; i < 16; ++i) {
            to.factors[i] = disco_factor(words[i/4], i % 4);
        }
    }

    template <typename F>
    static inline void lay_out(const char * const * rows, int64_t at, F take) {
        const disco_ints nibble = disco_bytes(0x0F0F0F0F), upper = disco_bytes(0x30303030);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 2
            for (int side = 0; side < 2; ++side) {
                disco_ints high[4], words[4], part[4];
                disco_turn_words(rows, at + 128 + 32*half + 16*side, high);
#pragma GCC unroll 2
                for (int odd = 0; odd < 2; ++odd) {
                    disco_turn_words(rows, at + 64*half + 32*odd + 16*side, words);
                    for (int i = 0; i < 4; ++i) {
                        const disco_ints bits = disco_left(high[i], odd ? 2 : 4);
                        part[i] = disco_either(disco_both(words[i], nibble), disco_both(bits, upper));
                    }
                    take(8*half + 2*odd + side, part);
                    for (int i = 0; i < 4; ++i) {
                        const disco_ints bits = disco_right(high[i], odd ? 2 : 0);
                        part[i] = disco_either(disco_both(disco_right(words[i], 4), nibble), disco_both(bits, upper));
                    }
                    take(8*half + 4 + 2*odd + side, part);
                }
            }
        }
    }

    static inline void scales(const char * block, float * to) {
        std::memcpy(to, block, sizeof *to);
        for (int part = 0; part < PARTS; ++part) {
#if defined(DISCO_DOT)
            const int32_t start = -32*sum(block, part);
#else
            const int8_t * bytes = reinterpret_cast<const int8_t *>(block) + ROW_AT + 16*part;
            int32_t first = 0, second = 0; // of what is added up in the lower and the upper half of a lane
            for (int i = 0; i < 16; i += 4) {
                first += bytes[i] + bytes[i + 1];
                second += bytes[i + 2] + bytes[i + 3];
            }
            const int32_t start = disco_pair(-32*first, -32*second);
#endif
            std::memcpy(to + 1 + part, &start, sizeof start);
        }
    }
    static inline disco_ints start(const float * of_part) { return disco_word(of_part); }
#if defined(DISCO_K_ALONG)
    static constexpr bool ALONG = true;
    struct given {
        __m256i bytes[8], sums; // sums of each 16 numbers, with the other sign
    };
    static inline void give(const char * block, given & to) {
        std::memcpy(to.bytes, block + ROW_AT, sizeof to.bytes);
        to.sums = _mm256_sub_epi16(_mm256_setzero_si256(), disco_load(block + SUMS_AT));
    }
    static inline void along(const char * weights, const given & row, int i, disco_along_sums & to) {
        const __m256i nibble = _mm256_set1_epi8(15), upper = _mm256_set1_epi8(48);
        const __m256i scales = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(weights + 192)));
        // 16 numbers have a scale, 32 a register.
        const auto factor = [&](int first) {
            const int f = first, g = first + 1;
            return _mm256_maskz_permutexvar_epi16(0x5555, _mm256_setr_epi32(f, f, f, f, g, g, g, g), scales);
        };
        __m256i sums = _mm256_slli_epi32(_mm256_madd_epi16(scales, row.sums), 5), others = _mm256_setzero_si256();
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const __m256i bits = disco_load(weights + 128 + 32*half);
            const __m256i a = disco_load(weights + 64*half), b = disco_load(weights + 64*half + 32);
            const __m256i parts[4] = {
                disco_either_of(_mm256_and_si256(a, nibble), _mm256_rol_epi64(bits, 4), upper),
                disco_either_of(_mm256_and_si256(b, nibble), _mm256_rol_epi64(bits, 2), upper),
                disco_either_of(_mm256_and_si256(_mm256_srli_epi32(a, 4), nibble), bits, upper),
                disco_either_of(_mm256_and_si256(_mm256_srli_epi32(b, 4), nibble), _mm256_rol_epi64(bits, 62), upper),
            };
            sums = disco_add_scaled(sums, parts[0], row.bytes[4*half], factor(8*half));
            others = disco_add_scaled(others, parts[1], row.bytes[4*half + 1], factor(8*half + 2));
            sums = disco_add_scaled(sums, parts[2], row.bytes[4*half + 2], factor(8*half + 4));
            others = disco_add_scaled(others, parts[3], row.bytes[4*half + 3], factor(8*half + 6));
        }
        std::memcpy(to.scales + i, weights + 208, sizeof *to.scales);
        to.set(i, _mm256_add_epi32(sums, others));
    }
#endif
#if defined(DISCO_ONE_ALONG)
    static constexpr bool ALONG = true;
    static constexpr int64_t SCALE_AT = 208;
    static inline __m256i along(const char * weights, const char * row) {
        const __m256i nibble = disco_bytes(0x0F0F0F0F), upper = disco_bytes(0x30303030);
        const __m128i scales = _mm_loadu_si128(reinterpret_cast<const __m128i *>(weights + 192));
        // 16 numbers have a scale, 32 a register: of two scales the first is in the lower half, the second in the upper one.
        const __m256i halves = _mm256_cvtepi8_epi16(
            _mm_shuffle_epi8(scales, _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15)));
        const __m256i offset = disco_multiply_pairs(disco_load(row + SUMS_AT), _mm256_cvtepi8_epi16(scales));
        __m256i sums = _mm256_sub_epi32(disco_none(), disco_left(offset, 5));
        for (int half = 0; half < 2; ++half) {
            const __m256i high = disco_load(weights + 128 + 32*half);
            const __m256i words[2] = {disco_load(weights + 64*half), disco_load(weights + 64*half + 32)};
            for (int n = 0; n < 4; ++n) {
                const __m256i bits = n < 2 ? disco_left(high, 4 - 2*n) : disco_right(high, 2*n - 4);
                const __m256i four = n < 2 ? words[n] : disco_high(words[n - 2]);
                const __m256i part = disco_either(disco_both(four, nibble), disco_both(bits, upper));
                const __m256i dots = _mm256_maddubs_epi16(part, disco_load(row + ROW_AT + 128*half + 32*n));
                const __m256i scale = _mm256_shuffle_epi8(halves, _mm256_set1_epi16((short) (0x0100 + 0x0202*(4*half + n))));
                sums = disco_sum(sums, disco_multiply_pairs(dots, scale));
            }
        }
        return sums;
    }
#endif
};

// Packs `n` numbers as quantize_row_q8_K_ref does, which goes over them one by one, to the same bits: of those that are farthest
// from 0 the first one becomes -127.
static inline void disco_pack_k(const float * from, char * to, int64_t n) {
    for (; n > 0; n -= 256, from += 256, to += disco_q8_k::ROW_BYTES) {
        const __m256 sign = _mm256_set1_ps(-0.0f);
        __m256 most = _mm256_setzero_ps();
        for (int i = 0; i < 256; i += 8) {
            most = _mm256_max_ps(_mm256_andnot_ps(sign, _mm256_loadu_ps(from + i)), most);
        }
        __m128 four = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
        four = _mm_max_ps(four, _mm_movehl_ps(four, four));
        const float farthest = _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
        if (farthest == 0.0f) {
            std::memset(to, 0, disco_q8_k::ROW_BYTES);
            continue;
        }
        int first = 0;
        while (from[first] != farthest && from[first] != -farthest) {
            ++first;
        }
        const float factor = -127.0f/from[first], scale = 1/factor;
        const __m256 factors = _mm256_set1_ps(factor);
        const __m256i byte = _mm256_set1_epi32(0xFF), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        std::memcpy(to, &scale, sizeof scale);
        __m256i sums[8];
        for (int i = 0; i < 8; ++i) {
            __m256i whole[4]; // what is no number is 0 in the lowest byte, as there
            for (int j = 0; j < 4; ++j) {
                const __m256 product = _mm256_mul_ps(factors, _mm256_loadu_ps(from + 32*i + 8*j));
                whole[j] = _mm256_and_si256(_mm256_cvtps_epi32(product), byte);
            }
            const __m256i bytes = _mm256_permutevar8x32_epi32(
                _mm256_packus_epi16(_mm256_packus_epi32(whole[0], whole[1]), _mm256_packus_epi32(whole[2], whole[3])), order);
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(to + disco_q8_k::ROW_AT + 32*i), bytes);
            sums[i] = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
        }
        for (int n_sums = 8; n_sums > 1; n_sums /= 2) {
            for (int i = 0; i < n_sums/2; ++i) {
                sums[i] = _mm256_hadd_epi16(sums[2*i], sums[2*i + 1]);
            }
        }
        const __m128i even = _mm256_castsi256_si128(sums[0]), odd = _mm256_extracti128_si256(sums[0], 1);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to + disco_q8_k::SUMS_AT), _mm_unpacklo_epi16(even, odd));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to + disco_q8_k::SUMS_AT + 16), _mm_unpackhi_epi16(even, odd));
    }
}

// Multiplies a part with `N` rows, which are together.
template <typename W, int N>
static inline void disco_multiply_part(
        const disco_ints * weights, disco_ints factor, int part, const float * rows, disco_ints * whole) {
    disco_ints dots[N];
    for (int c = 0; c < N; ++c) {
        dots[c] = W::start(rows + (1 + part)*N + c);
    }
    const float * words = rows + (W::FIRST + part*W::WORDS)*N;
#pragma GCC unroll 8
    for (int i = 0; i < W::WORDS; ++i) {
        for (int c = 0; c < N; ++c) {
            dots[c] = disco_dot(dots[c], weights[i], disco_word(words + i*N + c));
            DISCO_IN_ORDER(dots[c]);
        }
    }
    for (int c = 0; c < N; ++c) {
        whole[c] = disco_sum(whole[c], disco_scaled(dots[c], factor));
        DISCO_IN_ORDER(whole[c]);
    }
}

// Adds to `sum` what a block comes to with row `c` of `n` that are together.
template <typename W>
static inline disco_reals disco_add_block(
        const disco_k_tile<W> & tile, const float * rows, int n, int c, disco_ints whole, disco_reals sum) {
    const disco_reals scale = disco_each(rows[c]);
    sum = disco_times_and(disco_real(whole), disco_times(tile.scale, scale), sum);
    if constexpr (W::HAS_LEAST) {
        disco_ints least = disco_none();
        for (int i = 0; i < 4; ++i) {
            least = disco_sum(least, disco_multiply_pairs(tile.leasts[i], disco_word(rows + (1 + i)*n + c)));
        }
        sum = disco_times_and(disco_real(least), disco_times(tile.least, disco_each(-rows[c])), sum);
    }
    return sum;
}

#if defined(DISCO_K_ALONG)
// The same whole numbers of Q6_K for a single row, added up in another order: a weight row after another, so that memory is read in the
// order in which it lies, which the processor foresees; then block after block, what was left of each weight row, without a look at the
// weights again, which would be in another order. A weight row that is left in its middle, and taken up after 15 others, is not foreseen
// (an AMD Zen 5 reads 7 GB/s in place of 21 where nothing is asked for, 20 in place of 27 where the next tile is). So only a row whose
// sums and copies a first cache of 48 KB does not hold is taken in stretches, and what these read next is asked for.
static constexpr int64_t DISCO_K_BLOCKS = 64; // 36 KB of sums and of what is given

template <typename W>
static DISCO_APART void disco_multiply_along_k(
        const disco_product & of, const char * const * weights, const char * next, float * to) {
    // Side by side: where they are whole pages apart, what is read seems to be what was just written, and waits for it.
    struct {
        typename W::given given;
        disco_along_sums sums;
    } blocks[DISCO_K_BLOCKS];
    disco_reals sum = disco_each(0.0f);
    int64_t n = 0; // of a stretch
    for (int64_t begin = 0; begin < of.n_blocks; begin += n) {
        const int64_t left = of.n_blocks - begin;
        n = 1 + (left - 1)/((left + DISCO_K_BLOCKS - 1)/DISCO_K_BLOCKS); // equal ones
        // Asked for in the order in which it is read: weight rows of this stretch, then of what follows it.
        static constexpr int64_t BLOCKS_AHEAD = (48 << 10)/W::BYTES; // tried on an AMD Zen 5: a whole tile of long rows was slower
        const int64_t ahead = n*DISCO_LANES < BLOCKS_AHEAD ? DISCO_LANES : (BLOCKS_AHEAD + n - 1)/n;
        const char * here = weights[0] + begin*W::BYTES + ahead*of.weights_bytes;
        const char * after = (begin + n < of.n_blocks ? weights[0] + (begin + n)*W::BYTES : next) - (DISCO_LANES - ahead)*of.weights_bytes;
        for (int64_t b = 0; b < n; ++b) {
            W::give(of.rows + (begin + b)*W::ROW_BYTES, blocks[b].given);
        }
        for (int row = 0; row < DISCO_LANES; ++row) {
            const char * fetched = (row < DISCO_LANES - ahead ? here : after) + row*of.weights_bytes;
            for (int64_t b = 0; b < n; ++b, fetched += W::BYTES) {
                for (int64_t at = 0; at < W::BYTES; at += 64) {
                    DISCO_FETCH(fetched + at);
                }
                W::along(weights[row] + (begin + b)*W::BYTES, blocks[b].given, row, blocks[b].sums);
            }
        }
        for (int64_t b = 0; b < n; ++b) {
            const disco_reals scale = _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i *>(blocks[b].sums.scales)));
            const disco_reals of_row = disco_each(of.scales[(begin + b)*W::SCALES]);
            sum = disco_times_and(disco_real(disco_add_up(blocks[b].sums.whole)), disco_times(scale, of_row), sum);
        }
    }
    disco_write(to, sum);
}
#endif

// As in products.h, for few rows: what is laid out stays in registers.
template <typename W, int N>
static DISCO_APART void disco_multiply_few_k(
        const disco_product & of, const char * const * weights, const char * next, float * to) {
    disco_reals sums[N];
    for (int c = 0; c < N; ++c) {
        sums[c] = disco_each(0.0f);
    }
    for (int64_t b = 0; b < of.n_blocks; ++b) {
        const float * rows = of.scales + b*N*W::SCALES;
        disco_k_tile<W> tile;
        disco_ints whole[N];
        for (int c = 0; c < N; ++c) {
            whole[c] = disco_none();
        }
        if constexpr (!DISCO_FETCHES_PARTS) {
            disco_fetch_tile<W>(next, b);
        }
        W::factors(weights, b*W::BYTES, tile);
        W::lay_out(weights, b*W::BYTES, [&](int part, const disco_ints * words) DISCO_INLINE {
            if constexpr (DISCO_FETCHES_PARTS) {
                disco_fetch_tile<W, W::PARTS>(next, b, part);
            }
            disco_multiply_part<W, N>(words, tile.factors[part], part, rows, whole);
        });
        for (int c = 0; c < N; ++c) {
            sums[c] = disco_add_block<W>(tile, rows, N, c, whole[c], sums[c]);
        }
    }
    for (int c = 0; c < N; ++c) {
        disco_write(to + c*DISCO_LANES, sums[c]);
    }
}

// As in products.h.
template <typename W, int N>
static inline void disco_multiply_block_k(const disco_k_tile<W> & tile, const float * rows, float * sums) {
    disco_ints whole[N];
    for (int c = 0; c < N; ++c) {
        whole[c] = disco_none();
    }
    for (int part = 0; part < W::PARTS; ++part) {
        disco_multiply_part<W, N>(tile.weights + part*W::WORDS, tile.factors[part], part, rows, whole);
    }
    for (int c = 0; c < N; ++c) {
        float * sum = sums + c*DISCO_LANES;
        disco_write(sum, disco_add_block<W>(tile, rows, N, c, whole[c], disco_read(sum)));
    }
}
template <typename W>
static inline void disco_lay_out_k(const char * const * weights, const char * next, int64_t block, disco_k_tile<W> & tile) {
    disco_fetch_tile<W>(next, block);
    W::factors(weights, block*W::BYTES, tile);
    W::lay_out(weights, block*W::BYTES, [&](int part, const disco_ints * words) DISCO_INLINE {
        for (int i = 0; i < W::WORDS; ++i) {
            tile.weights[part*W::WORDS + i] = words[i];
        }
    });
}
#endif
