// Products of weights in Q4_1 with rows in Q8_1, and in Q4_0, Q8_0, IQ4_NL and MXFP4 with rows in Q8_0, for the copy of llama.cpp
// that native/llama_cpp.cmake builds (products.cpp calls it; k_products.h has K weights). ggml's own go from weight row to weight
// row for each row, or lay weights out anew when a model is loaded, and add up a register's lanes for each number. Here a tile of
// weight rows is laid out so that each lane is a weight row, and multiplied with up to DISCO_COLUMNS rows before it is done with.
// What is added up for a number, and in which order, is the same however many rows there are: block after block, whole numbers
// within a block. By AVX2, AVX-512 or VNNI it is the same, too.
#pragma once
#include <cstdint>
#include <cstring>

#if (defined(__AVX512F__) && defined(__AVX512BW__)) || (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))
#define DISCO_MULTIPLIES 1
#include <immintrin.h>
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
static inline disco_reals disco_lower_halves(disco_ints a) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)); }
static inline disco_reals disco_upper_halves(disco_ints a) {
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(a, 16)));
}
static inline disco_reals disco_read(const float * from) { return _mm512_loadu_ps(from); }
static inline void disco_write(float * to, disco_reals a) { _mm512_storeu_ps(to, a); }
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
static inline disco_reals disco_halves(__m256i a) { // the lower 16 bits of each 32
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, a), 0x08);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}
static inline disco_reals disco_lower_halves(disco_ints a) {
    return disco_halves(_mm256_and_si256(a, _mm256_set1_epi32(0xFFFF)));
}
static inline disco_reals disco_upper_halves(disco_ints a) { return disco_halves(_mm256_srli_epi32(a, 16)); }
static inline disco_reals disco_read(const float * from) { return _mm256_loadu_ps(from); }
static inline void disco_write(float * to, disco_reals a) { _mm256_storeu_ps(to, a); }
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
    return _mm256_add_epi32(_mm256_permute2x128_si256(b[0], b[1], 0x20), _mm256_permute2x128_si256(b[0], b[1], 0x31));
}
static inline __m256i disco_load(const char * from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)); }
// Bytes with a sign times those of a row, none of which is -128.
static inline __m256i disco_dot_signed(__m256i weights, const char * row) {
    return disco_add_pairs(_mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(disco_load(row), weights)));
}
#endif

static constexpr int DISCO_LANES = sizeof(disco_reals) / sizeof(float); // weight rows of a tile
static constexpr int64_t DISCO_BLOCK = 32; // numbers with one scale
static constexpr int64_t DISCO_AT_ONCE = 12; // blocks that are laid out before they are multiplied with more rows than DISCO_COLUMNS

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

// The same with 8.
static inline void disco_turn(const disco_ints * rows, disco_ints * words) {
    __m256i a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        words[i] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x20);
        words[i + 4] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x31);
    }
}
#endif

// What kinds of weights have, if they do not say otherwise: IS_K is of k_products.h; bytes that may be above 15 go as two nibbles
// where there is no VNNI, the upper ones behind the lower.
struct disco_kind {
    static constexpr bool IS_K = false, HAS_LEAST = false, IS_OF_BYTES = false, ALONG = false;
    static constexpr int64_t SCALES = 2, TOGETHER = 1; // numbers for a row's block; blocks that are turned together
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
    static constexpr int64_t TOGETHER = 1;
    static constexpr int WORDS = 8;
#endif

    // Turns `n` blocks, TOGETHER at most, of each weight row.
    static inline void turn(const char * const * rows, int64_t block, int64_t n, disco_ints * words) {
        disco_ints each[WORDS];
        for (int i = 0; i < WORDS; ++i) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
            each[i] = _mm512_maskz_loadu_epi32((__mmask16) ((1u << 5*n) - 1), rows[i] + block*BYTES);
#else
            (void) n;
            each[i] = _mm256_maskload_epi32(
                reinterpret_cast<const int *>(rows[i] + block*BYTES), _mm256_setr_epi32(-1, -1, -1, -1, -1, 0, 0, 0));
#endif
        }
        disco_turn(each, words);
    }

    // Makes a tile of the words of block `i` of those that were turned, the first of which is `block`.
    template <typename Tile>
    static inline void lay_out(const char * const *, int64_t, const disco_ints * words, int64_t i, Tile & to) {
        const disco_ints nibble = disco_bytes(0x0F0F0F0F);
        words += 5*i;
        to.scale = disco_lower_halves(words[0]);
        to.least = disco_upper_halves(words[0]);
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
    static constexpr int64_t TOGETHER = 1;
    static constexpr int WORDS = 8;
#endif

    static inline void turn(const char * const * rows, int64_t block, int64_t n, disco_ints * words) {
        disco_ints each[WORDS];
        for (int i = 0; i < WORDS; ++i) {
            const char * from = rows[i] + block*BYTES + ROW_AT;
            const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
#if defined(__AVX512F__) && defined(__AVX512BW__)
            const __m256i other = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from + (n - 1)*BYTES));
            each[i] = _mm512_inserti64x4(_mm512_castsi256_si512(first), other, 1);
#else
            (void) n;
            each[i] = first;
#endif
        }
        disco_turn(each, words);
    }

    template <typename Tile>
    static inline void lay_out(const char * const * rows, int64_t block, const disco_ints * words, int64_t i, Tile & to) {
        to.scale = disco_halves_at(rows, (block + i)*BYTES);
        for (int w = 0; w < 8; ++w) {
            set(to, w, disco_shifted(words[8*i + w]));
        }
    }

    static inline void scales(const char * block, float * to) { disco_q8_0_scales(block, 128, false, to); }
    static inline disco_ints start(const float * scales) { return disco_word(scales + 1); }
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
    static inline disco_ints start(const float * scales) { return disco_word(scales + 1); }
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

// Weights in MXFP4: the scale is a power of two, and bits mean halves of what is in the table, to which 12 is added.
struct disco_mxfp4 : disco_nibbles<1, disco_kind> {
    template <typename Tile>
    static inline void lay_out(const char * const * rows, int64_t block, const disco_ints * words, int64_t, Tile & to) {
        alignas(64) uint32_t bits[DISCO_LANES];
        for (int row = 0; row < DISCO_LANES; ++row) {
            const uint32_t power = (uint8_t) rows[row][block*BYTES];
            bits[row] = power < 2 ? 0x00200000u << power : (power - 1) << 23;
        }
        to.scale = disco_read(reinterpret_cast<const float *>(bits));
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

// k_products.h has it.
template <typename W>
static inline void disco_scales_k(const char * rows, int64_t row_bytes, int64_t n, int64_t n_blocks, float * to);

// SCALES numbers for each block of `n` rows.
template <typename W>
static inline void disco_scales(const char * rows, int64_t row_bytes, int64_t n, int64_t n_blocks, float * to) {
    if constexpr (W::IS_K) {
        disco_scales_k<W>(rows, row_bytes, n, n_blocks, to);
    } else {
        for (int64_t row = 0; row < n; ++row) {
            for (int64_t b = 0; b < n_blocks; ++b, to += W::SCALES) {
                W::scales(rows + row*row_bytes + b*W::ROW_BYTES, to);
            }
        }
    }
}

// Multiplies a block of a tile with `N` rows, and adds to `sums`.
template <typename W, int N>
static inline void disco_multiply_block(
        const disco_tile<W> & tile, const char * rows, int64_t row_bytes, const float * scales, int64_t n_scales,
        disco_reals * sums) {
    for (int c = 0; c < N; ++c) {
        const char * bytes = rows + c*row_bytes + W::ROW_AT;
        const float * scale = scales + c*n_scales;
        disco_ints dots = W::start(scale);
#if defined(DISCO_DOT)
        for (int i = 0; i < DISCO_BLOCK / 4; ++i) {
            dots = DISCO_DOT(dots, tile.weights[i], disco_word(bytes + 4*i));
        }
#else
        if constexpr (W::IS_OF_BYTES) {
            disco_ints lower = disco_none(), upper = disco_none();
            for (int i = 0; i < DISCO_BLOCK / 4; ++i) {
                const disco_ints four = disco_word(bytes + 4*i);
                lower = disco_dot_pairs(lower, tile.weights[i], four);
                upper = disco_dot_pairs(upper, tile.weights[i + DISCO_BLOCK / 4], four);
            }
            dots = disco_sum(dots, disco_sum(disco_add_pairs(lower), disco_left(disco_add_pairs(upper), 4)));
        } else {
            for (int i = 0; i < DISCO_BLOCK / 4; ++i) {
                dots = disco_dot_pairs(dots, tile.weights[i], disco_word(bytes + 4*i)); // 8*2*15*128 is within 16 bits
            }
            dots = disco_add_pairs(dots);
        }
#endif
        sums[c] = disco_times_and(disco_real(dots), disco_times(tile.scale, disco_each(scale[0])), sums[c]);
        if constexpr (W::HAS_LEAST) {
            sums[c] = disco_times_and(tile.least, disco_each(scale[1]), sums[c]);
        }
    }
}

// What a call's tiles have in common: `n_blocks` blocks a row; bytes from a row to the next; numbers of `to`; what disco_scales
// has made of the rows.
struct disco_product {
    const char * weights;
    int64_t n_weights, weights_bytes;
    const char * rows;
    int64_t n_rows, row_bytes, n_blocks;
    const float * scales;
    float * to;
    int64_t to_stride;

    int64_t n_tiles() const { return (n_weights + DISCO_LANES - 1) / DISCO_LANES; }
};

// Multiplies `n` blocks of a tile, from `block` on, with `N` rows, from `row` on.
template <typename W, int N>
static inline void disco_multiply(
        const disco_product & of, const disco_tile<W> * tile, int64_t block, int64_t n, int64_t row, float * to, int64_t to_stride) {
    disco_reals sums[N];
    for (int c = 0; c < N; ++c) {
        sums[c] = block ? disco_read(to + c*to_stride) : disco_each(0.0f);
    }
    for (int64_t b = 0; b < n; ++b) {
        disco_multiply_block<W, N>(
            tile[b], of.rows + row*of.row_bytes + (block + b)*W::ROW_BYTES, of.row_bytes,
            of.scales + 2*(row*of.n_blocks + block + b), 2*of.n_blocks, sums);
    }
    for (int c = 0; c < N; ++c) {
        disco_write(to + c*to_stride, sums[c]);
    }
}

// Asks early for the blocks of the next tile, of which `next` is the first byte: a guess does no harm.
template <typename W>
static inline void disco_fetch_tile(const char * next, int64_t block) {
    for (int64_t at = 0; at < W::TOGETHER*W::BYTES*DISCO_LANES; at += 64) {
        _mm_prefetch(next + block*W::BYTES*DISCO_LANES + at, _MM_HINT_T0);
    }
}

// The same for all blocks of few rows: what is laid out stays in registers.
template <typename W, int N>
static inline void disco_multiply_few(
        const disco_product & of, const char * const * weights, const char * next, float * to, int64_t to_stride) {
    disco_reals sums[N];
    for (int c = 0; c < N; ++c) {
        sums[c] = disco_each(0.0f);
    }
    const auto multiply = [&](const disco_ints * words, int64_t block, int64_t i) {
        disco_tile<W> tile;
        W::lay_out(weights, block, words, i, tile);
        disco_multiply_block<W, N>(
            tile, of.rows + (block + i)*W::ROW_BYTES, of.row_bytes, of.scales + 2*(block + i), 2*of.n_blocks, sums);
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
        disco_write(to + c*to_stride, sums[c]);
    }
}

// Calls disco_multiply for `n_rows` rows, `N` at most.
template <typename W, int N>
static inline void disco_multiply_rest(
        const disco_product & of, const disco_tile<W> * tile, int64_t block, int64_t n, int64_t row, int64_t n_rows, float * to,
        int64_t to_stride) {
    if constexpr (N > 0) {
        if (n_rows >= N) {
            disco_multiply<W, N>(of, tile, block, n, row, to, to_stride);
        } else {
            disco_multiply_rest<W, N - 1>(of, tile, block, n, row, n_rows, to, to_stride);
        }
    }
}

// k_products.h has them.
template <typename W, int N>
static inline void disco_multiply_few_k(
        const disco_product & of, const char * const * weights, const char * next, float * to, int64_t to_stride);
template <typename W>
static inline void disco_multiply_many_k(
        const disco_product & of, const char * const * weights, const char * next, int64_t row, int64_t end, float * to,
        int64_t to_stride);

#if defined(DISCO_ONE_ALONG)
// The same whole numbers for a single row, added up in another order.
template <typename W>
static inline void disco_multiply_along(const disco_product & of, const char * const * weights, const char * next, float * to) {
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

// The products of a tile with few rows.
template <typename W, int N>
static inline void disco_multiply_few_of(
        const disco_product & of, const char * const * weights, const char * next, float * to, int64_t to_stride) {
#if defined(DISCO_ONE_ALONG)
    if constexpr (N == 1 && W::ALONG) {
        return disco_multiply_along<W>(of, weights, next, to);
    } else
#endif
    if constexpr (W::IS_K) {
        disco_multiply_few_k<W, N>(of, weights, next, to, to_stride);
    } else {
        disco_multiply_few<W, N>(of, weights, next, to, to_stride);
    }
}

// And with the rows from `row` to `end`.
template <typename W>
static inline void disco_multiply_many(
        const disco_product & of, const char * const * weights, const char * next, int64_t row, int64_t end, float * to,
        int64_t to_stride) {
    disco_tile<W> tile[DISCO_AT_ONCE];
    disco_ints words[W::WORDS];
    for (int64_t b = 0; b < of.n_blocks; b += DISCO_AT_ONCE) {
        const int64_t m = of.n_blocks - b < DISCO_AT_ONCE ? of.n_blocks - b : DISCO_AT_ONCE;
        for (int64_t i = 0; i < m; i += W::TOGETHER) {
            const int64_t k = m - i < W::TOGETHER ? m - i : W::TOGETHER;
            disco_fetch_tile<W>(next, b + i);
            W::turn(weights, b + i, k, words);
            for (int64_t l = 0; l < k; ++l) {
                W::lay_out(weights, b + i, words, l, tile[i + l]);
            }
        }
        for (int64_t c = row; c < end; c += DISCO_COLUMNS) {
            disco_multiply_rest<W, DISCO_COLUMNS>(of, tile, b, m, c, end - c, to + (c - row)*to_stride, to_stride);
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
    const char * next = of.weights + (first + DISCO_LANES)*of.weights_bytes;
    alignas(64) float part[DISCO_COLUMNS*DISCO_LANES]; // where a tile has fewer rows than lanes
    const int64_t columns = n == DISCO_LANES ? of.n_rows : DISCO_COLUMNS;
    for (int64_t row = 0; row < of.n_rows; row += columns) {
        const int64_t end = row + columns < of.n_rows ? row + columns : of.n_rows;
        float * to = n == DISCO_LANES ? of.to + first : part;
        const int64_t to_stride = n == DISCO_LANES ? of.to_stride : DISCO_LANES;
        if (of.n_rows == 1) {
            disco_multiply_few_of<W, 1>(of, weights, next, to, to_stride);
        } else if (of.n_rows == 2) {
            disco_multiply_few_of<W, 2>(of, weights, next, to, to_stride);
        } else if constexpr (W::IS_K) {
            disco_multiply_many_k<W>(of, weights, next, row, end, to, to_stride);
        } else {
            disco_multiply_many<W>(of, weights, next, row, end, to, to_stride);
        }
        for (int64_t c = row; n != DISCO_LANES && c < end; ++c) {
            std::memcpy(of.to + c*of.to_stride + first, part + (c - row)*DISCO_LANES, n*sizeof(float));
        }
    }
}
#endif
