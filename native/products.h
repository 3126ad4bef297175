// Products of weights in Q4_1 with rows in Q8_1, and in Q4_0, Q8_0, IQ4_NL and MXFP4 with rows in Q8_0, for the copy of llama.cpp
// that native/llama_cpp.cmake builds (products.cpp calls it; k_products.h has K weights). ggml's own go from weight row to weight
// row for each row, or lay weights out anew when a model is loaded, and add up a register's lanes for each number. Here a tile of
// weight rows is laid out so that each lane is a weight row, and multiplied with up to DISCO_COLUMNS rows before it is done with.
// What is added up for a number, and in which order, is the same however many rows there are: block after block, whole numbers
// within a block. Rows are laid out beforehand, too, as they are multiplied (disco_scales). By AVX2, AVX-512 or VNNI it is the same, too.
#pragma once
#include <cstdint>
#include <cstring>

#if (defined(__AVX512F__) && defined(__AVX512BW__)) || (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))
#define DISCO_MULTIPLIES 1
#include <immintrin.h>
#include <type_traits>
#include <vector>

#if defined(__AVX512F__) && defined(__AVX512BW__)
using disco_ints = __m512i;
using disco_reals = __m512;
static constexpr int DISCO_COLUMNS = 16; // as registers allow
static inline disco_ints disco_both(disco_ints a, disco_ints b) { return _mm512_and_si512(a, b); }
static inline disco_ints disco_high(disco_ints a) { return _mm512_srli_epi32(a, 4); }
static inline disco_ints disco_bytes(int32_t four) { return _mm512_set1_epi32(four); }
static inline disco_reals disco_real(disco_ints a) { return _mm512_cvtepi32_ps(a); }
static inline disco_reals disco_each(float a) { return _mm512_set1_ps(a); }
static inline disco_reals disco_times(disco_reals a, disco_reals b) { return _mm512_mul_ps(a, b); }
static inline disco_reals disco_times_and(disco_reals a, disco_reals b, disco_reals c) { return _mm512_fmadd_ps(a, b, c); }
// The numbers in the lower and in the upper 16 bits of each lane.
static inline void disco_halves(disco_ints a, disco_reals & lower, disco_reals & upper) {
    lower = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a));
    upper = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(a, 16)));
}
static inline disco_reals disco_read(const float * from) { return _mm512_load_ps(from); }
static inline void disco_write(float * to, disco_reals a) { _mm512_store_ps(to, a); }
#if defined(__AVX512VNNI__)
#define DISCO_DOT(sums, weights, bytes) _mm512_dpbusd_epi32(sums, weights, bytes)
#else
static inline disco_ints disco_dot_pairs(disco_ints sums, disco_ints weights, disco_ints bytes) {
    return _mm512_add_epi16(sums, _mm512_maddubs_epi16(weights, bytes));
}
static inline disco_ints disco_add_pairs(disco_ints sums) { return _mm512_madd_epi16(sums, _mm512_set1_epi16(1)); }
#endif
static inline disco_ints disco_none() { return _mm512_setzero_si512(); }
static inline disco_ints disco_sum(disco_ints a, disco_ints b) { return _mm512_add_epi32(a, b); }
static inline disco_ints disco_left(disco_ints a, int n) { return _mm512_slli_epi32(a, n); }
// What of a table each nibble means.
static inline disco_ints disco_meant(disco_ints nibbles, __m128i table) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibbles);
}
static inline disco_ints disco_shifted(disco_ints a) { return _mm512_xor_si512(a, _mm512_set1_epi8((char) 0x80)); }
#else
using disco_ints = __m256i;
using disco_reals = __m256;
static constexpr int DISCO_COLUMNS = 4;
static inline disco_ints disco_both(disco_ints a, disco_ints b) { return _mm256_and_si256(a, b); }
static inline disco_ints disco_high(disco_ints a) { return _mm256_srli_epi32(a, 4); }
static inline disco_ints disco_bytes(int32_t four) { return _mm256_set1_epi32(four); }
static inline disco_reals disco_real(disco_ints a) { return _mm256_cvtepi32_ps(a); }
static inline disco_reals disco_each(float a) { return _mm256_set1_ps(a); }
static inline disco_reals disco_times(disco_reals a, disco_reals b) { return _mm256_mul_ps(a, b); }
static inline disco_reals disco_times_and(disco_reals a, disco_reals b, disco_reals c) { return _mm256_fmadd_ps(a, b, c); }
static inline void disco_halves(disco_ints a, disco_reals & lower, disco_reals & upper) {
    const __m256i sorted = _mm256_shuffle_epi8(a, _mm256_setr_epi8(
        0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    const __m256i both = _mm256_permute4x64_epi64(sorted, 0xD8);
    lower = _mm256_cvtph_ps(_mm256_castsi256_si128(both));
    upper = _mm256_cvtph_ps(_mm256_extracti128_si256(both, 1));
}
static inline disco_reals disco_read(const float * from) { return _mm256_load_ps(from); }
static inline void disco_write(float * to, disco_reals a) { _mm256_store_ps(to, a); }
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define DISCO_DOT(sums, weights, bytes) _mm256_dpbusd_epi32(sums, weights, bytes)
#elif defined(__AVXVNNI__)
#define DISCO_DOT(sums, weights, bytes) _mm256_dpbusd_avx_epi32(sums, weights, bytes)
#else
static inline disco_ints disco_dot_pairs(disco_ints sums, disco_ints weights, disco_ints bytes) {
    return _mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, bytes));
}
static inline disco_ints disco_add_pairs(disco_ints sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
#endif
static inline disco_ints disco_none() { return _mm256_setzero_si256(); }
static inline disco_ints disco_sum(disco_ints a, disco_ints b) { return _mm256_add_epi32(a, b); }
static inline disco_ints disco_left(disco_ints a, int n) { return _mm256_slli_epi32(a, n); }
static inline disco_ints disco_meant(disco_ints nibbles, __m128i table) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibbles);
}
static inline disco_ints disco_shifted(disco_ints a) { return _mm256_xor_si256(a, _mm256_set1_epi8((char) 0x80)); }
#endif

#if defined(DISCO_DOT)
static inline disco_ints disco_dot(disco_ints sums, disco_ints weights, disco_ints bytes) {
    return DISCO_DOT(sums, weights, bytes);
}
#else
static inline disco_ints disco_dot(disco_ints sums, disco_ints weights, disco_ints bytes) {
    return disco_dot_pairs(sums, weights, bytes);
}
#endif
#if defined(__GNUC__)
#define DISCO_INLINE __attribute__((always_inline))
#define DISCO_APART __attribute__((noinline)) // GCC has more registers for loops that are by themselves
// Keeps GCC from adding up in another order, for which it would lack registers.
#define DISCO_IN_ORDER(sum) __asm__("" : "+v"(sum))
#else
#define DISCO_INLINE
#define DISCO_APART
#define DISCO_IN_ORDER(sum) (void) (sum)
#endif

static inline int32_t disco_pair(int32_t lower, int32_t upper) {
    return (int32_t) (((uint32_t) lower & 0xFFFFu) | (uint32_t) upper << 16);
}
// Four bytes of a row, for all lanes.
static inline disco_ints disco_word(const void * from) {
    int32_t four;
    std::memcpy(&four, from, sizeof four);
    return disco_bytes(four);
}
// A number of each weight row, in 16 bits.
static inline disco_reals disco_halves_at(const char * const * rows, int64_t at) {
    const auto half = [&](int row) {
        uint16_t bits;
        std::memcpy(&bits, rows[row] + at, sizeof bits);
        return (short) bits;
    };
    const __m128i first = _mm_setr_epi16(half(0), half(1), half(2), half(3), half(4), half(5), half(6), half(7));
#if defined(__AVX512F__) && defined(__AVX512BW__)
    const __m128i other = _mm_setr_epi16(half(8), half(9), half(10), half(11), half(12), half(13), half(14), half(15));
    return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(first), other, 1));
#else
    return _mm256_cvtph_ps(first);
#endif
}

#if !defined(DISCO_DOT) && !(defined(__AVX512F__) && defined(__AVX512BW__))
#define DISCO_ONE_ALONG 1 // some weights are multiplied with a single row as they lie: turning them would cost more than it saves
// The sum of the lanes of each of eight registers.
static inline disco_ints disco_add_up(const disco_ints * rows) {
    __m256i a[4], b[2];
    for (int i = 0; i < 4; ++i) {
        a[i] = _mm256_add_epi32(
            _mm256_unpacklo_epi32(rows[2*i], rows[2*i + 1]), _mm256_unpackhi_epi32(rows[2*i], rows[2*i + 1]));
    }
    for (int i = 0; i < 2; ++i) {
        b[i] = _mm256_add_epi32(_mm256_unpacklo_epi64(a[2*i], a[2*i + 1]), _mm256_unpackhi_epi64(a[2*i], a[2*i + 1]));
    }
    // Not by vperm2i128, which is eight instructions inside an AMD Zen 1.
    const __m256i upper = _mm256_castsi128_si256(_mm256_extracti128_si256(b[0], 1));
    const __m256i inner = _mm256_inserti128_si256(upper, _mm256_castsi256_si128(b[1]), 1);
    return _mm256_add_epi32(inner, _mm256_blend_epi32(b[0], b[1], 0xF0));
}
static inline __m256i disco_load(const char * from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)); }
// Bytes with a sign times those of a row, none of which is -128.
static inline __m256i disco_dot_signed(__m256i weights, const char * row) {
    return disco_add_pairs(_mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(disco_load(row), weights)));
}
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__AVX512BW__)
#define DISCO_K_ALONG 1 // Q6_K is multiplied with a single row as it lies, weight row after weight row
#endif

static constexpr int DISCO_LANES = sizeof(disco_reals) / sizeof(float); // weight rows of a tile
static constexpr int64_t DISCO_BLOCK = 32; // numbers with one scale

// A block of a tile's weight rows: four numbers of each row in a register, from 0 on.
template <typename W>
struct disco_tile {
    disco_ints weights[W::REGISTERS];
    disco_reals scale, least;
};

#if defined(__AVX512F__) && defined(__AVX512BW__)
// Turns 16 bytes of each weight row, from `at` on, into four registers with a word of each row.
static inline void disco_turn_words(const char * const * rows, int64_t at, disco_ints * words) {
    __m512i a[4];
    for (int i = 0; i < 4; ++i) {
        const auto part = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(rows[row] + at)); };
        a[i] = _mm512_castsi128_si512(part(i));
        a[i] = _mm512_inserti32x4(a[i], part(i + 4), 1);
        a[i] = _mm512_inserti32x4(a[i], part(i + 8), 2);
        a[i] = _mm512_inserti32x4(a[i], part(i + 12), 3);
    }
    const __m512i b[4] = {_mm512_unpacklo_epi32(a[0], a[1]), _mm512_unpackhi_epi32(a[0], a[1]),
                          _mm512_unpacklo_epi32(a[2], a[3]), _mm512_unpackhi_epi32(a[2], a[3])};
    words[0] = _mm512_unpacklo_epi64(b[0], b[2]);
    words[1] = _mm512_unpackhi_epi64(b[0], b[2]);
    words[2] = _mm512_unpacklo_epi64(b[1], b[3]);
    words[3] = _mm512_unpackhi_epi64(b[1], b[3]);
}

// Turns 16 registers with a row each into 16 with a word of each row.
static inline void disco_turn(const disco_ints * rows, disco_ints * words) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        const __m512i even = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88), odd = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xDD);
        const __m512i even2 = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
        const __m512i odd2 = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xDD);
        words[i] = _mm512_shuffle_i32x4(even, even2, 0x88);
        words[i + 4] = _mm512_shuffle_i32x4(odd, odd2, 0x88);
        words[i + 8] = _mm512_shuffle_i32x4(even, even2, 0xDD);
        words[i + 12] = _mm512_shuffle_i32x4(odd, odd2, 0xDD);
    }
}
#else
// Four bytes of each weight row.
static inline disco_ints disco_words_at(const char * const * rows, int64_t at) {
    const auto word = [&](int row) {
        int32_t four;
        std::memcpy(&four, rows[row] + at, sizeof four);
        return four;
    };
    return _mm256_setr_epi32(word(0), word(1), word(2), word(3), word(4), word(5), word(6), word(7));
}
static inline void disco_turn_words(const char * const * rows, int64_t at, disco_ints * words) {
    __m256i a[4];
    for (int i = 0; i < 4; ++i) {
        const auto part = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(rows[row] + at)); };
        a[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(part(i)), part(i + 4), 1);
    }
    const __m256i b[4] = {_mm256_unpacklo_epi32(a[0], a[1]), _mm256_unpackhi_epi32(a[0], a[1]),
                          _mm256_unpacklo_epi32(a[2], a[3]), _mm256_unpackhi_epi32(a[2], a[3])};
    words[0] = _mm256_unpacklo_epi64(b[0], b[2]);
    words[1] = _mm256_unpackhi_epi64(b[0], b[2]);
    words[2] = _mm256_unpacklo_epi64(b[1], b[3]);
    words[3] = _mm256_unpackhi_epi64(b[1], b[3]);
}
#endif

// What kinds of weights have, if they do not say otherwise: IS_K is of k_products.h; bytes that may be above 15 go as two nibbles
// where there is no VNNI, the upper ones behind the lower.
struct disco_kind {
    static constexpr bool IS_K = false, HAS_LEAST = false, IS_OF_BYTES = false, ALONG = false;
    static constexpr int64_t TOGETHER = 1; // blocks that are turned together
    static constexpr int64_t FIRST = 2, WORDS_OF_ROW = DISCO_BLOCK / 4, SCALES = FIRST + WORDS_OF_ROW; // of a row's block
    static constexpr int64_t AT_ONCE = 12, COLUMNS = DISCO_COLUMNS; // blocks that are laid out, then multiplied with rows
    static constexpr int REGISTERS = DISCO_BLOCK / 4;
};
struct disco_bytes_kind : disco_kind {
#if !defined(DISCO_DOT)
    static constexpr bool IS_OF_BYTES = true;
    static constexpr int REGISTERS = 2*DISCO_BLOCK / 4;
#endif
    template <typename Tile>
    static inline void set(Tile & to, int w, disco_ints bytes) {
#if defined(DISCO_DOT)
        to.weights[w] = bytes;
#else
        to.weights[w] = disco_both(bytes, disco_bytes(0x0F0F0F0F));
        to.weights[w + DISCO_BLOCK / 4] = disco_both(disco_high(bytes), disco_bytes(0x0F0F0F0F));
#endif
    }
};
// Rows in Q8_0: of a block, scale as F16, and 32 bytes with a sign. What is added to weights is taken off in advance.
static constexpr int64_t DISCO_Q8_0_BYTES = 34, DISCO_Q8_0_AT = 2;
static inline void disco_q8_0_scales(const char * block, int offset, bool is_of_pairs, float * to) {
    uint16_t scale;
    std::memcpy(&scale, block, sizeof scale);
    to[0] = _cvtsh_ss(scale);
    const int8_t * bytes = reinterpret_cast<const int8_t *>(block) + DISCO_Q8_0_AT;
    int32_t first = 0, second = 0; // of what is added up in the lower and the upper half of a lane
    for (int i = 0; i < DISCO_BLOCK; i += 4) {
        first += bytes[i] + bytes[i + 1];
        second += bytes[i + 2] + bytes[i + 3];
    }
    const int32_t start = is_of_pairs ? disco_pair(-offset*first, -offset*second) : -offset*(first + second);
    std::memcpy(to + 1, &start, sizeof start);
}

// Weights in Q4_1: of a block, scale and least as F16, and 32 times 4 bits; with rows in Q8_1: scale and scaled sum as F16, and
// 32 bytes. A number is the weights' scale times the row's times the dot product, and the least times the scaled sum.
struct disco_q4_1 : disco_kind {
    static constexpr int64_t BYTES = 20, ROW_BYTES = 36, ROW_AT = 4;
    static constexpr bool HAS_LEAST = true;
#if defined(__AVX512F__) && defined(__AVX512BW__)
    static constexpr int64_t TOGETHER = 3; // blocks that are turned together
    static constexpr int WORDS = 16;
#else
    static constexpr int WORDS = 5;
#endif

    // Turns `n` blocks, TOGETHER at most, of each weight row.
    static inline void turn(const char * const * rows, int64_t block, int64_t n, disco_ints * words) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
        disco_ints each[WORDS];
        for (int i = 0; i < WORDS; ++i) {
            each[i] = _mm512_maskz_loadu_epi32((__mmask16) ((1u << 5*n) - 1), rows[i] + block*BYTES);
        }
        disco_turn(each, words);
#else
        (void) n;
        words[0] = disco_words_at(rows, block*BYTES);
        disco_turn_words(rows, block*BYTES + 4, words + 1);
#endif
    }

    // Makes a tile of the words of block `i` of those that were turned, the first of which is `block`.
    template <typename Tile>
    static inline void lay_out(const char * const *, int64_t, const disco_ints * words, int64_t i, Tile & to) {
        const disco_ints nibble = disco_bytes(0x0F0F0F0F);
        words += 5*i;
        disco_halves(words[0], to.scale, to.least);
        for (int w = 0; w < 4; ++w) {
            to.weights[w] = disco_both(words[w + 1], nibble);
            to.weights[w + 4] = disco_both(disco_high(words[w + 1]), nibble);
        }
    }

    // A row's block: its scale, and its scaled sum.
    static inline void scales(const char * block, float * to) {
        int32_t both;
        std::memcpy(&both, block, sizeof both);
        _mm_storel_pi(reinterpret_cast<__m64 *>(to), _mm_cvtph_ps(_mm_cvtsi32_si128(both)));
    }
    static inline disco_ints start(const float *) { return disco_none(); }
};

// Weights in Q8_0, too. To them 128 is added.
struct disco_q8_0 : disco_bytes_kind {
    static constexpr int64_t BYTES = DISCO_Q8_0_BYTES, ROW_BYTES = DISCO_Q8_0_BYTES, ROW_AT = DISCO_Q8_0_AT;
#if defined(__AVX512F__) && defined(__AVX512BW__)
    static constexpr int64_t TOGETHER = 2;
    static constexpr int WORDS = 16;
#else
    static constexpr int WORDS = 8;
#endif

    static inline void turn(const char * const * rows, int64_t block, int64_t n, disco_ints * words) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
        disco_ints each[WORDS];
        for (int i = 0; i < WORDS; ++i) {
            const char * from = rows[i] + block*BYTES + ROW_AT;
            const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
            const __m256i other = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from + (n - 1)*BYTES));
            each[i] = _mm512_inserti64x4(_mm512_castsi256_si512(first), other, 1);
        }
        disco_turn(each, words);
#else
        (void) n;
        disco_turn_words(rows, block*BYTES + ROW_AT, words);
        disco_turn_words(rows, block*BYTES + ROW_AT + 16, words + 4);
#endif
    }

    template <typename Tile>
    static inline void lay_out(const char * const * rows, int64_t block, const disco_ints * words, int64_t i, Tile & to) {
        to.scale = disco_halves_at(rows, (block + i)*BYTES);
        for (int w = 0; w < 8; ++w) {
            set(to, w, disco_shifted(words[8*i + w]));
        }
    }

    static inline void scales(const char * block, float * to) { disco_q8_0_scales(block, 128, false, to); }
    static inline disco_ints start(const float * scales) { return disco_word(scales); }
#if defined(DISCO_ONE_ALONG)
    static constexpr bool ALONG = true;
    static constexpr int64_t SCALE_AT = 0;
    static inline __m256i along(const char * weights, const char * row) {
        return disco_dot_signed(disco_load(weights + ROW_AT), row + ROW_AT);
    }
#endif
};

// Blocks of a scale and 32 times 4 bits, with rows in Q8_0.
template <int SCALE_BYTES, typename Kind>
struct disco_nibbles : Kind {
    static constexpr int64_t BYTES = SCALE_BYTES + 16, ROW_BYTES = DISCO_Q8_0_BYTES, ROW_AT = DISCO_Q8_0_AT;
    static constexpr int WORDS = 4;

    static inline void turn(const char * const * rows, int64_t block, int64_t, disco_ints * words) {
        disco_turn_words(rows, block*BYTES + SCALE_BYTES, words);
    }
    static inline disco_ints nibbles(const disco_ints * words, int w) {
        return disco_both(w < 4 ? words[w] : disco_high(words[w - 4]), disco_bytes(0x0F0F0F0F));
    }
    static inline disco_ints start(const float * scales) { return disco_word(scales); }
};
#if defined(DISCO_DOT)
static constexpr bool DISCO_IN_PAIRS = false;
#else
static constexpr bool DISCO_IN_PAIRS = true;
#endif

// Weights in Q4_0, to which 8 is added.
struct disco_q4_0 : disco_nibbles<2, disco_kind> {
    template <typename Tile>
    static inline void lay_out(const char * const * rows, int64_t block, const disco_ints * words, int64_t, Tile & to) {
        to.scale = disco_halves_at(rows, block*BYTES);
        for (int w = 0; w < 8; ++w) {
            to.weights[w] = nibbles(words, w);
        }
    }
    static inline void scales(const char * block, float * to) { disco_q8_0_scales(block, 8, DISCO_IN_PAIRS, to); }
};

// Half a power of two of each weight row, whose exponent is in a byte.
static inline disco_reals disco_powers(const char * const * rows, int64_t at) {
#if defined(__AVX512F__) && defined(__AVX512BW__) // written one by one and read at once, they would be waited for
    const auto byte = [&](int row) { return rows[row][at]; };
    const __m512i powers = _mm512_cvtepu8_epi32(_mm_setr_epi8(
        byte(0), byte(1), byte(2), byte(3), byte(4), byte(5), byte(6), byte(7),
        byte(8), byte(9), byte(10), byte(11), byte(12), byte(13), byte(14), byte(15)));
    const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(powers, _mm512_set1_epi32(1)), 23);
    const __m512i least = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), powers); // below the least that has all its precision
    return _mm512_castsi512_ps(_mm512_mask_blend_epi32(_mm512_cmplt_epi32_mask(powers, _mm512_set1_epi32(2)), normal, least));
#else
    alignas(32) uint32_t bits[DISCO_LANES];
    for (int row = 0; row < DISCO_LANES; ++row) {
        const uint32_t power = (uint8_t) rows[row][at];
        bits[row] = power < 2 ? 0x00200000u << power : (power - 1) << 23;
    }
    return disco_read(reinterpret_cast<const float *>(bits));
#endif
}

// Weights in MXFP4: the scale is a power of two, and bits mean halves of what is in the table, to which 12 is added.
struct disco_mxfp4 : disco_nibbles<1, disco_kind> {
    template <typename Tile>
    static inline void lay_out(const char * const * rows, int64_t block, const disco_ints * words, int64_t, Tile & to) {
        to.scale = disco_powers(rows, block*BYTES);
        const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
        for (int w = 0; w < 8; ++w) {
            to.weights[w] = disco_meant(nibbles(words, w), table);
        }
    }
    static inline void scales(const char * block, float * to) { disco_q8_0_scales(block, 12, DISCO_IN_PAIRS, to); }
};

// Weights in IQ4_NL: bits mean what is in the table, to which 128 is added.
struct disco_iq4_nl : disco_nibbles<2, disco_bytes_kind> {
    static inline __m128i table() { return _mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113); }
    template <typename Tile>
    static inline void lay_out(const char * const * rows, int64_t block, const disco_ints * words, int64_t, Tile & to) {
        to.scale = disco_halves_at(rows, block*BYTES);
        for (int w = 0; w < 8; ++w) {
            set(to, w, disco_shifted(disco_meant(nibbles(words, w), table())));
        }
    }
    static inline void scales(const char * block, float * to) { disco_q8_0_scales(block, 128, false, to); }
#if defined(DISCO_ONE_ALONG)
    static constexpr bool ALONG = true;
    static constexpr int64_t SCALE_AT = 0;
    static inline __m256i along(const char * weights, const char * row) {
        const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i *>(weights + 2));
        const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(low), _mm_srli_epi16(low, 4), 1);
        return disco_dot_signed(disco_meant(disco_both(both, disco_bytes(0x0F0F0F0F)), table()), row + ROW_AT);
    }
#endif
};

// What is made of `n` rows, SCALES numbers for each block of each, in the order in which they are multiplied: AT_ONCE blocks after
// AT_ONCE blocks, of these COLUMNS rows together (or what is left of either), and of these rows block after block: first what
// scales() has of each row, then the words, each number and word of all of these rows side by side.
// `row_at` says where a row lies, by its number.
template <typename W, typename F>
static inline void disco_scales_of(F row_at, int64_t n, int64_t n_blocks, float * to) {
    for (int64_t begin = 0; begin < n_blocks; begin += W::AT_ONCE) {
        const int64_t end = begin + W::AT_ONCE < n_blocks ? begin + W::AT_ONCE : n_blocks;
        for (int64_t row = 0; row < n; row += W::COLUMNS) {
            const int64_t m = n - row < W::COLUMNS ? n - row : W::COLUMNS;
            for (int64_t b = begin; b < end; ++b, to += m*W::SCALES) {
                for (int64_t c = 0; c < m; ++c) {
                    const char * block = row_at(row + c) + b*W::ROW_BYTES;
                    float first[W::FIRST];
                    W::scales(block, first);
                    for (int64_t i = 0; i < W::FIRST; ++i) {
                        std::memcpy(to + i*m + c, first + i, sizeof *first);
                    }
                    for (int64_t i = 0; i < W::WORDS_OF_ROW; ++i) {
                        std::memcpy(to + (W::FIRST + i)*m + c, block + W::ROW_AT + 4*i, sizeof *first);
                    }
                }
            }
        }
    }
}

template <typename W>
static inline void disco_scales(const char * rows, int64_t row_bytes, int64_t n, int64_t n_blocks, float * to) {
    disco_scales_of<W>([&](int64_t row) { return rows + row*row_bytes; }, n, n_blocks, to);
}

// Multiplies a block of a tile with `N` rows that are together, from number `C` of them on, and adds to `sums`.
template <typename W, int N, int C = 0>
static inline DISCO_INLINE void disco_multiply_block(const disco_tile<W> & tile, const float * rows, disco_reals * sums) {
    static constexpr int WHOLE = W::IS_OF_BYTES ? 2 : 1; // dot products of a row: of lower nibbles, then of upper ones
    static constexpr int M = N - C < 4/WHOLE ? N - C : 4/WHOLE; // rows at a time, as registers allow
    const float * words = rows + W::FIRST*N + C;
    disco_ints dots[WHOLE][M];
    for (int c = 0; c < M; ++c) {
        for (int part = 0; part < WHOLE; ++part) {
            dots[part][c] = WHOLE > 1 ? disco_none() : W::start(rows + N + C + c);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < DISCO_BLOCK / 4; ++i) {
        for (int c = 0; c < M; ++c) {
            const disco_ints four = disco_word(words + i*N + c);
            for (int part = 0; part < WHOLE; ++part) {
                disco_ints & sum = dots[part][c];
                sum = disco_dot(sum, tile.weights[i + part*DISCO_BLOCK / 4], four); // 8*2*15*128 is within 16 bits
                DISCO_IN_ORDER(sum);
            }
        }
    }
#if !defined(DISCO_DOT)
    for (int c = 0; c < M; ++c) {
        dots[0][c] = disco_add_pairs(dots[0][c]);
        if constexpr (W::IS_OF_BYTES) {
            dots[0][c] = disco_sum(disco_sum(W::start(rows + N + C + c), dots[0][c]), disco_left(disco_add_pairs(dots[1][c]), 4));
        }
    }
#endif
    for (int c = C; c < C + M; ++c) {
        sums[c] = disco_times_and(disco_real(dots[0][c - C]), disco_times(tile.scale, disco_each(rows[c])), sums[c]);
        if constexpr (W::HAS_LEAST) {
            sums[c] = disco_times_and(tile.least, disco_each(rows[N + c]), sums[c]);
        }
    }
    if constexpr (C + M < N) {
        disco_multiply_block<W, N, C + M>(tile, rows, sums);
    }
}

// What a call's tiles have in common: `n_blocks` blocks a row; bytes from a row to the next; numbers of `to`; what disco_scales
// has made of the rows, DISCO_MOST at most.
struct disco_product {
    const char * weights;
    int64_t n_weights, weights_bytes;
    const char * rows;
    int64_t n_rows, row_bytes, n_blocks;
    const float * scales;
    float * to;
    int64_t to_stride;
    float * const * places; // of each row's numbers, where these do not lie `to_stride` apart from `to` on
    const char * after; // what is read behind the last tile, as of the next expert; null: what lies there

    int64_t n_tiles() const { return (n_weights + DISCO_LANES - 1) / DISCO_LANES; }
};
static constexpr int64_t DISCO_MOST = 256;

// How many rows of `n_blocks` blocks are laid out at a time: 2 MB where that is enough rows for what laying out weights costs.
template <typename W>
static inline int64_t disco_rows_at_once(int64_t n_blocks) {
    const int64_t n = (2 << 20)/(int64_t) sizeof(float)/(W::SCALES*n_blocks)/W::COLUMNS*W::COLUMNS;
    return n < DISCO_MOST/4 ? DISCO_MOST/4 : n > DISCO_MOST ? DISCO_MOST : n;
}

// Asks early for the blocks of the next tile, of which `next` is the first byte: a guess does no harm. With AVX-512 into the second
// cache: the first one has 32 KB, as much as two tiles, and an AMD Zen 4 drops or delays what is asked for while the few lines on
// their way there are taken. Of `N_PARTS` equal parts of a block this is part `part`: what computes in between hides their way.
#if defined(__AVX512F__) && defined(__AVX512BW__)
#define DISCO_FETCH(from) _mm_prefetch(from, _MM_HINT_T1)
static constexpr bool DISCO_FETCHES_PARTS = true;
static constexpr int64_t DISCO_BYTES_AHEAD = 20 << 10; // on their way when they are needed: tried on an AMD Zen 5
#else
#define DISCO_FETCH(from) _mm_prefetch(from, _MM_HINT_T0)
static constexpr bool DISCO_FETCHES_PARTS = false;
static constexpr int64_t DISCO_BYTES_AHEAD = 1; // the next tile
#endif
// How many tiles ahead is asked for where there are few rows. Tiles of short weight rows are done before the next one has come.
template <typename W>
static inline int64_t disco_tiles_ahead(int64_t n_blocks) {
    const int64_t bytes = n_blocks*W::BYTES*DISCO_LANES;
    return bytes < DISCO_BYTES_AHEAD ? (DISCO_BYTES_AHEAD + bytes - 1)/bytes : 1;
}
template <typename W, int N_PARTS = 1>
static inline void disco_fetch_tile(const char * next, int64_t block, int part = 0) {
    static constexpr int64_t BYTES = W::TOGETHER*W::BYTES*DISCO_LANES, LINES = (BYTES + 63)/64;
    const int64_t end = 64*(LINES*(part + 1)/N_PARTS);
    for (int64_t at = 64*(LINES*part/N_PARTS); at < end; at += 64) {
        DISCO_FETCH(next + block*W::BYTES*DISCO_LANES + at);
    }
}

// Multiplies all blocks with few rows: what is laid out stays in registers. Sums of a row are side by side.
template <typename W, int N>
static DISCO_APART void disco_multiply_few(
        const disco_product & of, const char * const * weights, const char * next, float * to) {
    disco_reals sums[N];
    for (int c = 0; c < N; ++c) {
        sums[c] = disco_each(0.0f);
    }
    const auto multiply = [&](const disco_ints * words, int64_t block, int64_t i) {
        disco_tile<W> tile;
        W::lay_out(weights, block, words, i, tile);
        disco_multiply_block<W, N>(tile, of.scales + (block + i)*N*W::SCALES, sums);
    };
    disco_ints words[W::WORDS];
    int64_t b = 0;
    for (; b + W::TOGETHER <= of.n_blocks; b += W::TOGETHER) {
        disco_fetch_tile<W>(next, b);
        W::turn(weights, b, W::TOGETHER, words);
        for (int64_t i = 0; i < W::TOGETHER; ++i) {
            multiply(words, b, i);
        }
    }
    if (b < of.n_blocks) {
        W::turn(weights, b, of.n_blocks - b, words);
        for (int64_t i = 0; b + i < of.n_blocks; ++i) {
            multiply(words, b, i);
        }
    }
    for (int c = 0; c < N; ++c) {
        disco_write(to + c*DISCO_LANES, sums[c]);
    }
}

#if defined(DISCO_ONE_ALONG)
// The same whole numbers for a single row, added up in another order.
template <typename W>
static DISCO_APART void disco_multiply_along(
        const disco_product & of, const char * const * weights, const char * next, float * to) {
    disco_reals sums = disco_each(0.0f);
    for (int64_t b = 0; b < of.n_blocks; ++b) {
        disco_fetch_tile<W>(next, b);
        disco_ints each[DISCO_LANES];
        for (int i = 0; i < DISCO_LANES; ++i) {
            each[i] = W::along(weights[i] + b*W::BYTES, of.rows + b*W::ROW_BYTES);
        }
        const disco_reals scale = disco_times(disco_halves_at(weights, b*W::BYTES + W::SCALE_AT), disco_each(of.scales[b*W::SCALES]));
        sums = disco_times_and(disco_real(disco_add_up(each)), scale, sums);
    }
    disco_write(to, sums);
}
#endif

// k_products.h has the same of K weights.
template <typename W>
struct disco_k_tile;
template <typename W, int N>
static DISCO_APART void disco_multiply_few_k(
        const disco_product & of, const char * const * weights, const char * next, float * to);
#if defined(DISCO_K_ALONG)
template <typename W>
static DISCO_APART void disco_multiply_along_k(
        const disco_product & of, const char * const * weights, const char * next, float * to);
#endif
template <typename W>
static inline void disco_lay_out_k(const char * const * weights, const char * next, int64_t block, disco_k_tile<W> & tile);
template <typename W, int N>
static inline void disco_multiply_block_k(const disco_k_tile<W> & tile, const float * rows, float * sums);

template <typename W, int N>
static inline void disco_multiply_few_of(const disco_product & of, const char * const * weights, const char * next, float * to) {
#if defined(DISCO_ONE_ALONG)
    if constexpr (N == 1 && W::ALONG) {
        return disco_multiply_along<W>(of, weights, next, to);
    } else
#endif
#if defined(DISCO_K_ALONG)
    if constexpr (N == 1 && W::ALONG) {
        disco_multiply_along_k<W>(of, weights, next, to);
    } else
#endif
    if constexpr (W::IS_K) {
        disco_multiply_few_k<W, N>(of, weights, next, to);
    } else {
        disco_multiply_few<W, N>(of, weights, next, to);
    }
}

// Lays out `n` blocks, from `block` on.
template <typename W>
static inline void disco_lay_out(
        const char * const * weights, const char * next, int64_t block, int64_t n, disco_tile<W> * tiles) {
    disco_ints words[W::WORDS];
    for (int64_t i = 0; i < n; i += W::TOGETHER) {
        const int64_t k = n - i < W::TOGETHER ? n - i : W::TOGETHER;
        disco_fetch_tile<W>(next, block + i);
        W::turn(weights, block + i, k, words);
        for (int64_t l = 0; l < k; ++l) {
            W::lay_out(weights, block + i, words, l, tiles[i + l]);
        }
    }
}

// Multiplies `n` blocks with `n_rows` rows that are together, `N` at most, and adds to `to`.
template <typename W, int N, typename Tile>
static inline void disco_multiply(const Tile * tiles, int64_t n, const float * rows, int64_t n_rows, float * to) {
    if constexpr (N > 1) {
        if (n_rows < N) {
            return disco_multiply<W, N - 1>(tiles, n, rows, n_rows, to);
        }
    }
    if constexpr (W::IS_K) {
        disco_multiply_block_k<W, N>(*tiles, rows, to);
    } else {
        disco_reals sums[N];
        for (int c = 0; c < N; ++c) {
            sums[c] = disco_read(to + c*DISCO_LANES);
            DISCO_IN_ORDER(sums[c]); // else GCC copies bytes, and waits for them
        }
        for (int64_t b = 0; b < n; ++b) {
            disco_multiply_block<W, N>(tiles[b], rows + b*N*W::SCALES, sums);
        }
        for (int c = 0; c < N; ++c) {
            DISCO_IN_ORDER(sums[c]);
            disco_write(to + c*DISCO_LANES, sums[c]);
        }
    }
}

// Multiplies all blocks with all rows. Sums stay near until all is added up.
template <typename W>
static DISCO_APART void disco_multiply_many(
        const disco_product & of, const char * const * weights, const char * next, float * to) {
    std::conditional_t<W::IS_K, disco_k_tile<W>, disco_tile<W>> tiles[W::AT_ONCE];
    std::memset(to, 0, of.n_rows*DISCO_LANES*sizeof(float));
    for (int64_t b = 0; b < of.n_blocks; b += W::AT_ONCE) {
        const int64_t m = of.n_blocks - b < W::AT_ONCE ? of.n_blocks - b : W::AT_ONCE;
        if constexpr (W::IS_K) {
            disco_lay_out_k<W>(weights, next, b, *tiles);
        } else {
            disco_lay_out<W>(weights, next, b, m, tiles);
        }
        for (int64_t c = 0; c < of.n_rows; c += W::COLUMNS) {
            const float * rows = of.scales + (b*of.n_rows + c*m)*W::SCALES;
            disco_multiply<W, W::COLUMNS>(tiles, m, rows, of.n_rows - c, to + c*DISCO_LANES);
        }
    }
}

// The products of tile number `t` with all rows.
template <typename W>
static void disco_multiply_tile(const disco_product & of, int64_t t) {
    const int64_t first = t*DISCO_LANES;
    const int64_t n = of.n_weights - first < DISCO_LANES ? of.n_weights - first : DISCO_LANES;
    const char * weights[DISCO_LANES];
    for (int64_t i = 0; i < DISCO_LANES; ++i) {
        weights[i] = of.weights + (first + (i < n ? i : n - 1))*of.weights_bytes;
    }
    // The first tiles are asked for by nobody, but those of another expert than the first. So of small blocks, which small models have,
    // only experts' are asked for further ahead: with 135M in Q4_1 a token took a twentieth longer.
    const int64_t n_tiles = of.n_tiles(), ahead = t + ((W::IS_K || of.places) && of.n_rows <= 2 ? disco_tiles_ahead<W>(of.n_blocks) : 1);
    const char * next = of.weights + (ahead < n_tiles ? ahead : n_tiles)*DISCO_LANES*of.weights_bytes;
    if (of.after && ahead >= n_tiles) {
        next = of.after + (ahead - n_tiles)*DISCO_LANES*of.weights_bytes;
    }
    alignas(64) float sums[DISCO_MOST*DISCO_LANES];
    if (of.n_rows == 1) {
        disco_multiply_few_of<W, 1>(of, weights, next, sums);
    } else if (of.n_rows == 2) {
        disco_multiply_few_of<W, 2>(of, weights, next, sums);
    } else {
        disco_multiply_many<W>(of, weights, next, sums);
    }
    for (int64_t row = 0; row < of.n_rows; ++row) {
        float * to = (of.places ? of.places[row] : of.to + row*of.to_stride) + first;
        if (n == DISCO_LANES) {
            std::memcpy(to, sums + row*DISCO_LANES, DISCO_LANES*sizeof(float));
        } else {
            std::memcpy(to, sums + row*DISCO_LANES, n*sizeof(float));
        }
    }
}
#endif
